"""`dsx-pipe`: show, draw and choose pipeline schedules.

dsx-pipe show zb-h1 --ranks 4 --micro-batches 8 --out zb.svg
dsx-pipe show --file own.txt --text
dsx-pipe show --timeline measured.json --out measured.svg
dsx-pipe plan --costs layers.json --ranks 4 --batch 64 --memory 16G
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsx_core import CommandParser, run_program

from ._version import __version__
from .errors import PipelineError, ScheduleError
from .planner import candidates, load_costs
from .schedule import (
    BUILDERS,
    Schedule,
    StageTimes,
    Timeline,
    build,
    check,
    live_activations,
    load_timeline,
    save_chart,
    simulate,
    with_communication,
)

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx-pipe") -> int:
    """Run the command line. Return 0, or 2 after one line on stderr if something was wrong."""
    return run_program(lambda: _run(argv, prog))


def _run(argv: Sequence[str] | None, prog: str) -> int:
    arguments = _parser(prog).parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ScheduleError, PipelineError, OSError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog, description="Pipeline schedules: show and plan them.", version=f"dsx-pipe {__version__}"
    )
    commands = parser.add_subparsers(required=True)

    show = commands.add_parser("show", help="print, check and draw a schedule or a measured step")
    show.add_argument("name", nargs="?", choices=sorted(BUILDERS), help="a known schedule")
    show.add_argument("--file", help="read the schedule from this text file instead")
    show.add_argument("--timeline", help="draw this measured step (JSON of dsx_pipe.schedule.save_timeline) instead")
    show.add_argument("--ranks", type=int, default=4)
    show.add_argument("--micro-batches", type=int, default=8)
    show.add_argument("--chunks", type=int, help="stages per rank, for interleaved and inference")
    show.add_argument("--forward", type=float, default=1.0, help="time of one forward of a whole rank")
    show.add_argument("--backward", type=float, default=2.0, help="time of one backward of a whole rank")
    show.add_argument("--weight-share", type=float, default=0.5, help="share of the backward that is for the weights")
    show.add_argument("--communication", action="store_true", help="write sends and receives out")
    show.add_argument("--text", action="store_true", help="print the schedule itself")
    show.add_argument("--json", action="store_true", help="print JSON: length, bubble and kept activations")
    show.add_argument("--out", help="write a chart to this .svg or .png file")
    show.set_defaults(run=_show)

    plan = commands.add_parser("plan", help="choose schedule, split and micro-batches from measured layer costs")
    plan.add_argument("--costs", required=True, help="JSON of dsx_pipe.planner.save_costs")
    plan.add_argument("--ranks", type=int, required=True)
    plan.add_argument("--batch", type=int, required=True, help="samples of a step, over all micro-batches")
    plan.add_argument("--memory", help="bytes a rank may use; 16G, 800M")
    plan.add_argument("--latency", type=float, default=0.0, help="seconds of a message between two ranks")
    plan.add_argument("--top", type=int, default=5, help="candidates to list")
    plan.add_argument("--json", action="store_true", help="print the candidates as JSON")
    plan.add_argument("--save", help="write the chosen schedule to this text file")
    plan.set_defaults(run=_plan)
    return parser


def _show(arguments: argparse.Namespace) -> int:
    given = [x for x in (arguments.name, arguments.file, arguments.timeline) if x]
    if len(given) != 1:
        raise ScheduleError(f"got {len(given)} of NAME, --file and --timeline, expected one of them")
    if arguments.json and arguments.text:
        raise ScheduleError("got --json and --text, expected one of them")
    if arguments.timeline and (arguments.text or arguments.communication):
        raise ScheduleError(
            "--timeline: got --text or --communication, but a measured step has no schedule to print; leave them out"
        )
    if arguments.timeline:
        timeline, kept = load_timeline(arguments.timeline), None
    else:
        timeline, kept = _simulate_schedule(arguments)
    if arguments.json:
        facts = {"name": timeline.name, "ranks": timeline.ranks, "step": timeline.length}
        _print_line(json.dumps({**facts, "bubble_share": timeline.bubble_share, "kept_activations": kept}))
    else:
        if kept is not None:
            _print_line(f"activations kept per rank: {' '.join(map(str, kept))}")
        share = f"{timeline.bubble_share:.1%}"
        _print_line(f"{timeline.name}: {timeline.ranks} ranks, step {timeline.length:.6g}, bubble {share}")
    if arguments.out:
        save_chart(timeline, arguments.out)
    return 0


def _simulate_schedule(arguments: argparse.Namespace) -> tuple[Timeline, list[int]]:
    if arguments.file:
        schedule = Schedule.parse(Path(arguments.file).read_text())
    else:
        schedule = build(arguments.name, arguments.ranks, arguments.micro_batches, arguments.chunks)
    check(schedule)
    if arguments.communication:
        schedule = with_communication(schedule)
        check(schedule)
    if arguments.text:
        sys.stdout.write(str(schedule))
    share = schedule.ranks / schedule.stages
    weight = arguments.backward * arguments.weight_share
    times = StageTimes(share * arguments.forward, share * (arguments.backward - weight), share * weight)
    return simulate(schedule, (times,) * schedule.stages), list(live_activations(schedule))


def _plan(arguments: argparse.Namespace) -> int:
    found = candidates(
        load_costs(arguments.costs), arguments.ranks, arguments.batch,
        memory=_parse_bytes(arguments.memory), latency=arguments.latency,
    )  # fmt: skip
    if arguments.save:
        Path(arguments.save).write_text(str(found[0].build(arguments.ranks)))
    if arguments.json:
        _print_line(json.dumps([vars(c) for c in found[: arguments.top]], indent=2))
        return 0
    rows = [("schedule", "chunks", "micro", "seconds", "bubble", "MiB/rank", "stages begin at")]
    for c in found[: arguments.top]:
        most, starts = max(c.bytes_per_rank) / (1 << 20), " ".join(map(str, c.parts[:-1]))
        numbers = (str(c.chunks), str(c.micro_batches), f"{c.seconds:.4g}", f"{c.bubble_share:.1%}", f"{most:.0f}")
        rows.append((c.schedule, *numbers, starts))
    for name, *numbers, starts in rows:
        _print_line(f"{name:<12} {' '.join(f'{n:>9}' for n in numbers)}  {starts}")
    return 0


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _parse_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    number, unit = (text[:-1], text[-1].upper()) if text and text[-1].upper() in _UNITS else (text, "")
    try:
        return int(float(number) * _UNITS.get(unit, 1))
    except ValueError:
        raise ScheduleError(f"--memory: got {text!r}, expected a number of bytes like 800M or 16G") from None
