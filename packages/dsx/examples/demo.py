"""The main job from start to end, in two commands a user would type:

    dsx launch --num_procs 2 train_gpt.py --out runs/demo --stop-at 140            # ZeRO 2, stopped before the end
    dsx launch --num_procs 1 train_gpt.py --resume runs/demo --stage 3 --generate 300    # ZeRO 3, up to the end

and checks that the second goes on with the loss the first ended with. With GPUs the first uses all of them. Options of
this script are below; everything else is handed to `train_gpt.py` (`--data ~/books --layers 6 --seconds 60 ...`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
# The same number computed by other processes in another order; anything larger is a mistake.
ROUNDING = 1e-3


def processes(wanted: int | None) -> int:
    """How many processes train first: all GPUs (a power of two, to divide the batch), or two on CPU."""
    devices = torch.cuda.device_count()
    return wanted or (1 << (devices.bit_length() - 1) if devices else 2)


def launch(count: int, *arguments: str) -> None:
    """`dsx launch` with `count` processes; the cores are shared out among them."""
    kind = "--num_gpus" if torch.cuda.is_available() else "--num_procs"
    threads = str(max(1, (os.cpu_count() or 1) // count))
    command = ["launch", "--quiet", kind, str(count), str(HERE / "train_gpt.py"), *arguments]
    print(f"\n$ dsx {' '.join(command)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "dsx", *command], env={"OMP_NUM_THREADS": threads, **os.environ})
    if done.returncode != 0:
        raise SystemExit(f"demo: the command above ended with exit code {done.returncode}")


def validation(out: Path) -> list[tuple[int, float]]:
    """`(samples, bits per byte)` of every validation of the run, in order."""
    lines = map(json.loads, (out / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [(e["step"], e["value"]) for e in lines if e["label"] == "Validation/Samples/bits_per_byte"]


def unused(folder: Path) -> Path:
    """`folder`, or with a number behind it, such that no earlier run is there."""
    candidates = [folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def main() -> int:
    """Run both commands and compare; 0 if the run went on where it had stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="output directory (default: a new one)")
    parser.add_argument("--procs", type=int, help="processes of the first part (default: every GPU, else 2)")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps in all")
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of training in the first part")
    options, passed_on = parser.parse_known_args()
    out, first = unused(options.out), processes(options.procs)
    start = time.monotonic()
    common = ["--steps", str(options.steps), *passed_on]

    stop = str(max(1, options.steps * 7 // 8))
    launch(first, "--out", str(out), "--stop-at", stop, "--seconds", str(options.seconds), *common)
    before = validation(out)
    seconds = str(options.seconds / 4)
    launch(1, "--resume", str(out), "--stage", "3", "--generate", "300", "--seconds", seconds, *common)
    after = validation(out)[len(before) :]

    title = "one run, two ways of sharding it"
    table = Table("", "samples", "validation, bits per byte", title=title, box=box.MARKDOWN)
    rows = [
        (f"start, {first} process{'es' * (first > 1)}", before[0]),
        ("before the checkpoint", before[-1]),
        ("resumed: ZeRO 3, 1 process", after[0]),
        ("end", after[-1]),
    ]
    for name, (samples, bits) in rows:
        table.add_row(name, str(samples), f"{bits:.6f}")
    Console().print(table)
    print(f"checkpoints, metrics and report.html: {out}   ({time.monotonic() - start:.0f} s)")
    if before[-1][0] != after[0][0] or abs(before[-1][1] - after[0][1]) > ROUNDING:
        print(f"demo: the resumed run did not go on with the same loss: {before[-1]} and {after[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
