"""The command `tools/dev.py gpu`: what is to be learnt in the first hour on a GPU.

    python3 tools/dev.py gpu --prepare            with network: fetch the wheels that the GPU machine lacks, into .whl
    python3 tools/dev.py gpu [STAGE ...]          without network: the stages (default: all), one after another
    python3 tools/dev.py gpu parity --limit 120   one stage, with a limit of its own

A stage that fails is recorded, and the next goes on. What was found is in one JSON file and one page, in $OUT if that
is set, else in .gpu-report. The exit code is 1 where something really differs: a result that is wrong, a test that
fails, a program that crashes. What is missing here, or had no time, is told and is no failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from devenv import ROOT, DevError, ensure, say

from gpu import environment, report
from gpu.running import Outcome, Record, run_stage
from gpu.stages import STAGES, Here


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="tools/dev.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("stages", nargs="*", metavar="STAGE", help=f"some of all, {', '.join(STAGES)}")
    made.add_argument("--limit", type=float, metavar="S", help="seconds of each stage, in place of its own limit")
    made.add_argument("--prepare", action="store_true", help="fetch the wheels that the GPU machine lacks")
    return made


def chosen_stages(names: Sequence[str]) -> list[str]:
    """The stages in their order; `versions` is always the first, since it says what machine the others ran on."""
    unknown = [name for name in names if name not in (*STAGES, "all")]
    if unknown:
        raise DevError(f"no stage {unknown[0]!r}; expected some of all, {', '.join(STAGES)}")
    whole = not names or "all" in names
    return [name for name in STAGES if whole or name in names or name == "versions"]


def report_folder() -> Path:
    """$OUT, or .gpu-report in the checkout."""
    return Path(os.environ.get("OUT") or ROOT / ".gpu-report").resolve()


def commit() -> str:
    """The checkout's commit; `unknown` where git is missing or the tree came without its history."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def gpu(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises `DevError` where nothing can be run."""
    options = parser().parse_args(arguments)
    if options.prepare:
        return environment.prepare(ensure(), ROOT / ".whl")
    if options.limit is not None and options.limit <= 0:
        raise DevError(f"--limit: got {options.limit:g}, expected seconds above 0")
    names = chosen_stages(options.stages)
    simulated = os.environ.get("DSX_SIMCUDA") == "1"
    made, trouble = environment.ensure_gpu(ROOT)
    folder = report_folder()
    variables = {**made.variables(), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    outcomes: list[Outcome] = []
    for name in names:
        # The logs are kept out of $OUT, which may take a few files only.
        here = Here(made, ROOT / ".gpu-report" / "logs" / name, folder, simulated, trouble)
        limit = options.limit or STAGES[name].limit_s
        say(f"{name}: at most {limit:.0f} s")
        outcomes.append(run_stage(name, STAGES[name].programs(here), limit, here.folder, variables))
        tell(outcomes[-1])
        report.write(folder, outcomes, commit(), simulated)  # after each: the machine may be taken away
        if name == "versions" and no_device(outcomes[-1]):
            raise DevError(
                "torch sees no CUDA device here; to rehearse on a simulated one: PYTHONPATH=packages/dsx-simcuda/src"
                " python3 -m dsx_simcuda tools/dev.py gpu"
            )
    say(f"report: {folder / report.PAGE} and {report.JSON}")
    return 1 if any(outcome.verdict == "bad" for outcome in outcomes) else 0


def no_device(outcome: Outcome) -> bool:
    """Whether the stage `versions` found none."""
    return any(record.name == "device" and record.verdict == "bad" for record in outcome.records)


def tell(outcome: Outcome) -> None:
    """What came of a stage, on the terminal: what is good as a count, the rest by name."""
    counts = {v: sum(r.verdict == v for r in outcome.records) for v in ("good", "bad", "skipped", "incomplete")}
    shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    say(f"{outcome.stage}: {outcome.verdict} in {outcome.seconds:.0f} s ({shown or 'nothing to judge'})")
    for record in outcome.records:
        if record.verdict in ("bad", "incomplete"):
            say(f"  {record.verdict}: {record.name}: {_head(record)}")


def _head(record: Record) -> str:
    lines = record.text.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
