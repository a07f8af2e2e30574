"""``dsx plan``: memory, messages and time of a job before it runs.

dsx plan MODEL --gpus 64 --machine H100-SXM
dsx plan MODEL --config dsx.json --gpus 64 --machine H100-SXM
dsx plan MODEL --config dsx.json --gpus 64 --search
dsx plan calibrate -o machine.json
dsx plan --measure --num_procs 2 train.py --deepspeed_config dsx.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsx_core import CodedError, CommandParser, run_program
from dsx_core.progress import Progress

from ._version import __version__

__all__ = ["main"]

_USUAL = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
"""The configuration of a question without one, such as "does this model fit on eight of these?"."""


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx-plan") -> int:
    """Run the command. Returns 0 where the plan fits, 1 for a mistake, 3 where it does not fit."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program(lambda: _run(words, prog))


def _run(words: list[str], prog: str) -> int:
    if words[:1] == ["calibrate"]:
        return _calibrate(words[1:], f"{prog} calibrate")
    if words[:1] == ["machines"]:
        return _machines(words[1:], f"{prog} machines")
    if words[:1] == ["--measure"]:
        from .autotuning.command import main as measure  # lazy import: the launcher

        return measure(words[1:], prog=f"{prog} --measure")
    args = _parser(prog).parse_args(words)
    try:
        return _plan(args)
    except (CodedError, OSError, ValueError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        version=f"dsx-plan {__version__}",
        description="Memory, messages and time of a training job, before it runs. No device is needed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n  calibrate  measure this machine\n  machines   print the table of devices\n"
        "  --measure  [options of dsx launch, as --num_procs 2] SCRIPT ...: search by plans and trials of the script,"
        " as dsx launch --autotuning tune\n",
    )
    parser.add_argument(
        "model", help="file.py:function, package.module:function, a folder with a config.json, or hf://NAME: a folder"
        " or a model of the Hugging Face Hub",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--config", metavar="FILE", help=f"the configuration of dsx.initialize (default: {json.dumps(_USUAL)})"
    )
    parser.add_argument("-n", "--gpus", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--per-host", type=int, metavar="N", help="ranks of a host (default: the machine's)")
    parser.add_argument(
        "-m",
        "--machine",
        metavar="NAME|FILE",
        help="a device of the table, a calibration's file, or here: this machine (the default if it has a GPU)",
    )
    parser.add_argument(
        "--disk", type=float, metavar="GB", help="room on the disks of a host (default: the machine's, else no limit)"
    )
    parser.add_argument("-s", "--sequence", type=int, metavar="TOKENS", help="tokens of a sample")
    parser.add_argument("-b", "--batch", metavar="FILE.py:FUNCTION", help="a function that makes one micro-batch")
    parser.add_argument("--recompute", action="store_true", help="the model recomputes its blocks in backward")
    parser.add_argument(
        "--attention", choices=("flash2", "flash3"), default="flash2", help="kernels of attention: FlashAttention-2"
        " (PyTorch's own; the default), or FlashAttention-3 and cuDNN, which are faster on Hopper and later",
    )  # fmt: skip
    parser.add_argument("--fp8", action="store_true", help="products of blocks multiply FP8, as with torchao")
    parser.add_argument(
        "--alike", action="store_true", help="the blocks of the model (a folder) are alike: few are replayed and stand"
        " for all, so that ten thousand take seconds",
    )  # fmt: skip
    parser.add_argument(
        "--sliced-loss", action="store_true", help="ranks that slice the layers keep their slice of the logits, and"
        " compute the loss on them, as torchtitan and Megatron-LM do",
    )  # fmt: skip
    parser.add_argument(
        "--search",
        action="store_true",
        help="try axes of ranks, schedules, ZeRO stages, micro-batches, offload and recomputation",
    )
    parser.add_argument(
        "--longest", action="store_true", help="find the longest sequence that fits, and the settings that reach it;"
        " --batch is then a function of the length",
    )  # fmt: skip
    parser.add_argument(
        "--largest", action="store_true", help="find the deepest model that fits, and the placement that reaches it;"
        " a function as MODEL is then one of the number of blocks",
    )  # fmt: skip
    parser.add_argument(
        "--phases", action="store_true", help="plan the memory of each phase of a job that shares its devices with a"
        " generator: train, sleep, generate, push",
    )  # fmt: skip
    parser.add_argument(
        "--generator", metavar="TOKENS[xRANKS]", help="with --phases: tokens whose keys and values it holds at a time,"
        " and the ranks that divide it (1); 0x0: it has devices of its own",
    )  # fmt: skip
    parser.add_argument("--bucket", type=int, metavar="MB", help="with --phases: of a push, in units of 2^20 (256)")
    parser.add_argument(
        "--picture", metavar="FILE", help="write memory and timeline of a step as SVG; with --longest or --largest:"
        " memory over the size",
    )  # fmt: skip
    parser.add_argument(
        "--vary", action="append", default=[], metavar="PATH=JSON", help="a list of values to search, as "
        "zero_optimization.stage=[1,2,3]; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=JSON", help="change a key of the configuration, as"
        " zero_optimization.stage=3; null takes it away; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--emit", choices=("torchtitan", "megatron", "deepspeed", "accelerate"),
        help="print the layout (of the best plan) as that system's configuration, in place of the plan",
    )  # fmt: skip
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the plan as JSON (alone or with -: print it)"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with a timeline and memory over time")
    return parser


def _plan(args: argparse.Namespace) -> int:
    from .errors import PlanError
    from .models import _named
    from .planner import plan
    from .searching import search
    from .text import describe_plan, describe_search, describe_skipped

    if args.longest or args.largest:
        return _farthest(args)
    batch = _named(args.batch)() if args.batch else None
    common: dict[str, Any] = {
        "world_size": args.gpus, "ranks_per_host": args.per_host, "machine": _machine(args), "batch": batch,
        "sequence": args.sequence, "fp8": args.fp8, "attention": args.attention,
        "sliced_loss": args.sliced_loss,
    }  # fmt: skip
    config = _changed(args)
    if args.alike and (args.search or args.vary or args.phases):
        raise PlanError("--alike: got it with a search or --phases, expected one configuration")
    space, generator = _space(args, config, common["machine"]), _generator(args)
    silent = args.json == "-" or args.emit is not None
    if space:
        with Progress(0, "planning", unit="configurations", shown=sys.stderr.isatty()) as bar:
            found = search(args.model, config, space, prune=args.search and not args.vary, progress=bar.reach, **common)
        if not silent:
            sys.stdout.write(describe_search(found[:20], [key for key, values in space.items() if len(values) > 1]))
            sys.stdout.write(describe_skipped([(one.values, one.reason) for one in found.skipped]))
        best = found[0]
    else:
        with Progress(1, "planning", unit="configurations", shown=sys.stderr.isatty()) as bar:
            bar.add(0)
            best = plan(args.model, config, recompute=args.recompute, generator=generator, alike=args.alike, **common)
            bar.add(1)
        if not silent:
            sys.stdout.write(describe_plan(best))
    if args.json == "-":
        sys.stdout.write(best.to_json(indent=2) + "\n")
    elif args.json:
        Path(args.json).write_text(best.to_json(indent=2) + "\n", encoding="utf-8")
    if args.html:
        from .page import plan_page

        Path(args.html).write_text(plan_page(best), encoding="utf-8")
    if args.picture:
        from .page import plan_picture

        Path(args.picture).write_text(plan_picture(best), encoding="utf-8")
    if args.emit:
        _emit(best, args.emit)
    return 0 if best.fits else 3


def _generator(args: argparse.Namespace) -> Any:
    """The generator of --phases; None without."""
    from .errors import PlanError
    from .phases import Generator

    if not args.phases:
        if args.generator is not None or args.bucket is not None:
            raise PlanError("--generator, --bucket: got one without --phases, which plans the phases of a job")
        return None
    if args.search or args.vary:
        raise PlanError("--phases: got it with a search, expected one configuration: plan the best one with --phases")
    tokens, _, ranks = (args.generator or "0").partition("x")
    if not tokens.isdigit() or not (ranks or "1").isdigit():
        raise PlanError(f"--generator: got {args.generator!r}, expected TOKENS or TOKENSxRANKS, as 65536x2")
    return Generator(int(tokens), int(ranks or 1), (256 if args.bucket is None else args.bucket) << 20)


def _farthest(args: argparse.Namespace) -> int:
    """--longest and --largest."""
    from .errors import PlanError
    from .lengths import describe_longest, longest
    from .models import _named
    from .reaching import memory_picture
    from .sizes import describe_largest, largest

    own = (
        "search",
        "vary",
        "emit",
        "fp8",
        "sliced_loss",
        "html",
        "phases",
        *(("sequence", "largest") if args.longest else ()),
    )
    wrong = [f"--{name.replace('_', '-')}" for name in own if getattr(args, name)]
    wrong += ["--attention"] if args.attention != "flash2" else []
    if wrong:
        mine, what = ("--longest", "lengths") if args.longest else ("--largest", "models")
        raise PlanError(f"{mine}: got {', '.join(wrong)} beside it; it tries settings and {what} of its own")
    maker: Any = _named(args.batch) if args.batch else None
    common: dict[str, Any] = {
        "world_size": args.gpus, "ranks_per_host": args.per_host, "machine": _machine(args),
        "recompute": True if args.recompute else None,
        "report": lambda text: sys.stderr.write(f"planning: {text}\n") if sys.stderr.isatty() else None,
    }  # fmt: skip
    if args.longest:
        found = longest(args.model, _changed(args), batch=maker, **common)
        text, axis = describe_longest(found), "tokens of a sequence"
    else:
        batch = None if maker is None else maker()
        found = largest(args.model, _changed(args), batch=batch, sequence=args.sequence, **common)
        text, axis = describe_largest(found), "blocks of the model"
    if args.json != "-":
        sys.stdout.write(text)
    plan = found.best.plan
    if args.json and plan is not None:
        text = plan.to_json(indent=2) + "\n"
        sys.stdout.write(text) if args.json == "-" else Path(args.json).write_text(text, encoding="utf-8")
    if args.picture:
        Path(args.picture).write_text(memory_picture(found, axis), encoding="utf-8")
    return 0


def _machine(args: argparse.Namespace) -> Any:
    """The machine to plan for, with the room on its disks where that is given."""
    found = _named_machine(args.machine)
    return found if args.disk is None else replace(found, disk_bytes=int(args.disk * 1e9))


def _named_machine(given: str | None) -> Any:
    """The machine of `--machine`. A processor only if it was asked for: a job that is planned has GPUs, and the times
    of this machine's processor would be taken for theirs.
    """
    from .errors import PlanError
    from .machine import Machine

    if given not in (None, "here"):
        return Machine.of(given)
    from .devices import DEVICES

    found = Machine.of_this_host()
    if given is None and found.device == "cpu":
        raise PlanError(
            "--machine: got none, and this machine has no GPU; expected the job's machine, one of"
            f" {', '.join(sorted(DEVICES))} (figures: `dsx plan machines`), or the file of `dsx plan calibrate`;"
            " --machine here plans for this processor"
        )
    return found


def _emit(best: Any, system: str) -> None:
    from .emit import emit
    from .text import verdict

    found = emit(best, system)
    sys.stdout.write(found.text)
    sys.stderr.write("".join(f"{line}\n" for line in (verdict(best), *found.notes)))


def _changed(args: argparse.Namespace) -> Any:
    """The configuration with what --set changes."""
    from .configs import with_values
    from .engine import engine_to_plan
    from .errors import PlanError

    changes: dict[str, Any] = {}
    for given in args.set:
        path, sign, text = given.partition("=")
        try:
            changes[path] = json.loads(text)
        except ValueError as error:
            raise PlanError(f"--set: got {given!r}, expected PATH=JSON as zero_optimization.stage=3") from error
        if not sign or not path:
            raise PlanError(f"--set: got {given!r}, expected PATH=JSON as zero_optimization.stage=3")
    config = args.config
    if config is None:
        config = _USUAL
        sys.stderr.write(f"--config: got none; planned with {json.dumps(with_values(config, changes))}\n")
    return with_values(engine_to_plan().read(config), changes) if changes else config


def _space(args: argparse.Namespace, config: Any, machine: Any) -> dict[str, list[Any]]:
    from .errors import PlanError
    from .searching import usual_space

    space: dict[str, list[Any]] = {}
    if args.search and not args.vary:
        on_host = args.per_host or machine.ranks_per_host
        space = usual_space(config, args.gpus, on_host)
    for given in args.vary:
        path, sign, text = given.partition("=")
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not sign or not isinstance(values, list) or not values:
            raise PlanError(f"--vary: got {given!r}, expected PATH=[value, ...] as zero_optimization.stage=[1,2,3]")
        space[path] = values
    return space


def _calibrate(words: Sequence[str], prog: str) -> int:
    parser = CommandParser(prog=prog, description="Measure this machine for plans.")
    parser.add_argument("--json", action="store_true", help="print the measured machine as JSON, and nothing else")
    parser.add_argument("-o", "--output", default="machine.json", metavar="FILE", help="where to (machine.json)")
    parser.add_argument("--no-links", action="store_true", help="do not start two processes to measure messages")
    args = parser.parse_args(words)
    from .calibrate import calibrate

    folder = Path(args.output).resolve().parent
    if not folder.is_dir():  # said before a minute of measuring, not after it
        sys.stderr.write(f"{prog}: --output {args.output}: {folder} is no folder; make it first\n")
        return 1
    try:
        say = sys.stderr.write if args.json else sys.stdout.write
        found = calibrate(links=not args.no_links, report=lambda text: say(f"measuring {text}\n"))
        found.save(args.output)
    except (CodedError, OSError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1
    if args.json:
        sys.stdout.write(Path(args.output).read_text(encoding="utf-8"))
        return 0
    constants = ", ".join(f"{name} {value:.3g}" for name, value in vars(found.constants).items())
    sys.stdout.write(f"{found.name}: {constants}\nwritten to {args.output}; use it with --machine {args.output}\n")
    return 0


def _plain(value: Any) -> dict[str, Any]:
    """A record or a read-only mapping as a dictionary, for JSON."""
    return dict(value if isinstance(value, Mapping) else vars(value))


def _machines(words: Sequence[str], prog: str) -> int:
    parser = CommandParser(prog=prog, description="Print the table of devices and networks.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(words).json
    from .devices import DEVICES, NETWORKS

    if as_json:
        table = {"devices": DEVICES, "networks": NETWORKS}
        found = {kind: {name: vars(one) for name, one in sorted(rows.items())} for kind, rows in table.items()}
        sys.stdout.write(json.dumps(found, indent=1, default=_plain) + "\n")
        return 0

    for name, device in sorted(DEVICES.items()):
        rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in device.teraflops.items())
        sys.stdout.write(
            f"{name}: {device.memory_gib:g} GiB, {device.memory_gbs:g} GB/s, TFLOPS {rates}; links {device.link_gbs:g},"
            f" host {device.host_link_gbs:g}, network {device.network_gbs:g} GB/s ({device.source}); constants"
            f" {'fitted to ' + device.constants_from if device.constants_from else 'not fitted to this device'}\n"
        )
    for name, network in sorted(NETWORKS.items()):
        sys.stdout.write(f"+{name}: {network.gbs:g} GB/s for each device ({network.source})\n")
    return 0
