"""`dsx-nvme tune`: finds the fastest settings for a folder's drive, and prints them as an `aio` section."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from dsx_core import CommandParser

from ..config import AioConfig
from ..errors import NvmeError, OptionError
from . import search
from .search import Found
from .show import Progress, parse_count, parse_size, svg_bars, text_bars
from .space import DEFAULT, Setting, read_space
from .target import Target

PROGRAM = "dsx-nvme tune"
BUDGET = 25.0  # seconds
SHOWN = 8


def parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    """The options."""
    p = CommandParser(prog=prog, description=__doc__)
    p.add_argument(
        "--nvme_dir", nargs="+", required=True, help="folders on the drives to tune for; several are used at once"
    )
    p.add_argument("--sweep_config", help="JSON file with the values to choose from")
    p.add_argument("--no_read", action="store_true", help="do not measure reads")
    p.add_argument("--no_write", action="store_true", help="do not measure writes")
    p.add_argument("--io_size", type=parse_size, default=parse_size("400M"), help="bytes per measurement (400M)")
    p.add_argument("--gpu", action="store_true", help="tensors in GPU memory")
    p.add_argument("--gds", action="store_true", help="GPUDirect Storage")
    p.add_argument(
        "--flush_page_cache", action="store_true", help="drop the file from the page cache before reads (needs no sudo)"
    )
    p.add_argument("--log_dir", default="./_aio_bench_logs", help="where tune.json and tune.svg go")
    p.add_argument("--loops", type=parse_count, default=1, help="measurements per trial; their median counts")
    p.add_argument("--verbose", action="store_true", help="print every trial")
    p.add_argument("--seconds", type=float, default=BUDGET, help=f"time for the search ({BUDGET:.0f})")
    p.add_argument("--exhaustive", action="store_true", help="also try every setting, and compare")
    p.add_argument("--config", help="JSON configuration whose aio section is the starting point")
    p.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    p.add_argument("--update", action="store_true", help="write the result into --config")
    return p


def main(argv: Sequence[str] | None = None, *, prog: str = PROGRAM) -> int:
    """Run; returns an exit code. `prog`: the name that the program was called by."""
    args = parser(prog).parse_args(argv)
    try:
        return _run(args)
    except (OptionError, NvmeError, OSError, ValueError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1


def _run(args: argparse.Namespace) -> int:
    directions = [d for d, off in (("read", args.no_read), ("write", args.no_write)) if not off]
    if not directions:
        raise OptionError("--no_read and --no_write together leave nothing to measure")
    if args.seconds <= 0:
        raise OptionError(f"--seconds {args.seconds}: expected more than 0")
    if args.json and (args.exhaustive or args.verbose):
        raise OptionError("--json prints one result: leave --exhaustive and --verbose out")
    if args.update and not args.config:
        raise OptionError("--update needs --config")
    config = _load(args.config)
    space = read_space(args.sweep_config) if args.sweep_config else DEFAULT
    device = "cuda" if args.gpu or args.gds else "cpu"
    if not args.json:
        sys.stdout.write(f"Tuning on {args.nvme_dir}\n")
    with Target(args.nvme_dir, args.io_size, device, args.gds, args.flush_page_cache) as target:
        start = _start(config)
        share = _calibrate(target, start, directions, args.seconds, args.loops)

        def measure(setting: Setting) -> dict[str, float]:
            speeds = {
                d: _median([target.speed(setting, d, share=share) for _ in range(args.loops)]) for d in directions
            }
            if args.verbose:
                sys.stdout.write(f"{setting.name}: {json.dumps({k: round(v, 3) for k, v in speeds.items()})}\n")
            return speeds

        bar = Progress("tuning")
        found = search.guided(space, measure, start=start, budget=args.seconds, tell=bar.update)
        bar.finish(f"({len(found.trials)} of {len(space.all())} settings)")
        _report(args, found, directions)
        if args.exhaustive:
            _compare(space, measure, found, args.seconds / 3)
    if args.update:
        config["aio"] = {**config.get("aio", {}), **found.best.section()}
        for old in ("thread_count", "num_threads"):
            config["aio"].pop(old, None)
        with open(args.config, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
            file.write("\n")
    return 0


def _load(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _start(config: dict[str, Any]) -> Setting:
    section = config.get("aio")
    if not section:
        return Setting()
    aio = AioConfig.from_dict(section)
    return Setting(aio.block_size, aio.queue_depth, aio.intra_op_parallelism, aio.single_submit, aio.overlap_events)


def _calibrate(target: Target, start: Setting, directions: list[str], seconds: float, loops: int) -> float:
    """The share of the bytes with which about forty trials fit into the time. It writes the complete file once."""
    speed = target.speed(start, "write")
    if directions == ["read"]:
        speed = target.speed(start, "read")
    trial = seconds / 40 / loops / len(directions)
    least = min(1.0, (32 << 20) / target.nbytes)
    return max(least, min(1.0, trial * speed * 1e9 / (target.nbytes * len(target.files))))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _report(args: argparse.Namespace, found: Found, directions: list[str]) -> None:
    ranked = sorted(found.trials, key=found.score, reverse=True)
    os.makedirs(args.log_dir, exist_ok=True)
    trials = [{"aio": s.section(), "gbps": [dict(t) for t in found.trials[s]]} for s in ranked]
    result = {"aio": found.best.section(), "gbps": found.speeds, "seconds": found.seconds, "trials": trials}
    with open(os.path.join(args.log_dir, "tune.json"), "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    if args.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        bars = [(s.name, found.score(s)) for s in ranked[:SHOWN]]
        sys.stdout.write(text_bars(bars, f"GB/s ({' + '.join(directions)})") + "\n")
        best = ", ".join(f"{d} = {found.speeds[d]:.2f}" for d in directions)
        sys.stdout.write(f"Best performance (GB/sec): {best}\n")
        sys.stdout.write(json.dumps({"aio": found.best.section()}, indent=2) + "\n")
    groups = [(s.name, [(d, _median([t[d] for t in found.trials[s]])) for d in directions]) for s in ranked[:24]]
    with open(os.path.join(args.log_dir, "tune.svg"), "w", encoding="utf-8") as file:
        file.write(svg_bars(f"dsx-nvme tune: {', '.join(args.nvme_dir)}", groups, "GB/s"))


def _compare(space: Any, measure: Any, found: Found, seconds: float) -> None:
    bar = Progress("every setting")
    every = search.exhaustive(space, measure, finish_seconds=seconds, tell=bar.update)
    bar.finish()
    here = [sum(measure(found.best).values()) for _ in range(3)]
    there = [sum(measure(every.best).values()) for _ in range(3)]
    sys.stdout.write(
        f"exhaustive: {every.best.name} in {every.seconds:.0f} s; guided {found.best.name} reaches "
        f"{_median(here) / _median(there):.2f} of it (measured in turn)\n"
    )
