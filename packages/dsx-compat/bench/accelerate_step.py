"""Step time of one Accelerate program on dsx and on DeepSpeed: the same script, two CPU processes, ZeRO stages 2 and 3.

    python packages/dsx-compat/bench/accelerate_step.py [--rounds 3] [--precision bf16] [--stages 2 3] [--json FILE]

Each round starts the program once on each system, by torchrun, and for dsx by `dsx launch`, too. A run reports its
median step and its transport. There is a table for fp32 and one for bf16 (`mixed_precision`), with the medians of the
runs and the ratio DeepSpeed / dsx; rows that DeepSpeed wins come first. The model is shaped like GPT-2 and has 19
million parameters. Goal: a ratio of at least 1.2.

The bench needs the packages of requirements.txt. The program finds dsx's `deepspeed` through `dsx_compat.activate()`,
and DeepSpeed's own without that call, so the environment must not have dsx-compat installed (`tools/dev.py bench` makes
such an environment).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from dsx_testkit.benches import PRECISIONS, losers_first, report_and_leave, run_systems
from dsx_testkit.results import Table, add_json_option

SOURCES = Path(__file__).resolve().parents[1] / "src"


def program(args: argparse.Namespace) -> None:
    """Train on this rank, and report the median step."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "LOCAL_SIZE": "2"}
    if args.system == "dsx":
        sys.path.insert(0, str(SOURCES))
        import dsx_compat

        dsx_compat.activate()
    import deepspeed
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from transformers import GPT2Config, GPT2LMHeadModel

    is_dsx = "dsx_compat" in str(deepspeed.__file__)
    if is_dsx != (args.system == "dsx"):
        raise SystemExit(f"{args.system}: got deepspeed from {deepspeed.__file__}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=args.layers, n_embd=384, n_head=6, vocab_size=21000, n_positions=256)
    net = GPT2LMHeadModel(config)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=args.stage, gradient_clipping=1.0),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # Accelerate's default is NCCL
        mixed_precision="bf16" if args.precision == "bf16" else "no",
    )
    rows = torch.randint(0, config.vocab_size, (2 * (args.steps + 3), args.length))
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4), loader)
    times = []
    for ids in loader:
        began = time.perf_counter()
        accelerator.backward(net(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    report_and_leave(args.out, {"ms": 1e3 * statistics.median(times[3:])})


def table(precision: str, stages: list[int], results: dict[str, list[dict[str, Any]]]) -> Table:
    """The figures of a precision."""
    ms = {name: statistics.median(row["ms"] for row in rows) for name, rows in results.items() if rows}
    found = Table(
        {"system": "", "transport": "", "ms per step": "{:.0f}", "DeepSpeed / dsx": "{:.2f}x"},
        "" if precision == "fp32" else precision,
    )
    rows = []
    for name, took in ms.items():
        peer = ms.get(f"deepspeed, stage {name.split('stage ')[1][0]}") if name.startswith("dsx") else None
        rows.append((name, results[name][-1]["transport"], took, peer and peer / took))
    for row in losers_first(rows, 3):
        found.add(*row)
    for stage in stages:
        ours, theirs = ms.get(f"dsx, stage {stage}"), ms.get(f"deepspeed, stage {stage}")
        if ours and theirs:
            text = f"{precision}: stage {stage} at least 1.2x DeepSpeed"
            found.goal(text, f"{theirs / ours:.2f}x", met=theirs / ours >= 1.2)
    return found


def main() -> None:
    """Parse arguments and run the rounds."""
    parser = argparse.ArgumentParser(description="Step time of an Accelerate program on dsx and on DeepSpeed")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system per stage")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--precision", choices=PRECISIONS, help="default: both")
    parser.add_argument("--system", choices=("dsx", "deepspeed"), help="run the program once, in this process")
    parser.add_argument("--stage", type=int, help="with --system: the ZeRO stage")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    add_json_option(parser)
    args = parser.parse_args()
    if args.system:
        program(args)
    systems = {f"{system}, stage {stage}": (2, "torchrun") for stage in args.stages for system in ("dsx", "deepspeed")}
    systems |= {f"dsx, stage {stage}, dsx launch": (2, "dsx") for stage in args.stages}

    def command(name: str, precision: str) -> list[str]:
        system, stage = name.split(", ")[0], name.split("stage ")[1][0]
        options = {"system": system, "stage": stage, "precision": precision, "layers": args.layers,
                   "steps": args.steps, "length": args.length}  # fmt: skip
        return [__file__, *(part for key, value in options.items() for part in (f"--{key}", str(value)))]

    precisions = [args.precision] if args.precision else PRECISIONS
    for precision, found in run_systems(systems, command, rounds=args.rounds, precisions=precisions).items():
        table(precision, args.stages, found).save(args.json)


if __name__ == "__main__":
    main()
