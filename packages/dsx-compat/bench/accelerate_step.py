"""Step time of one Accelerate program on dsx and on DeepSpeed: the same script, two CPU processes, ZeRO stages 2 and 3.

    python packages/dsx-compat/bench/accelerate_step.py [--layers 6] [--steps 10] [--rounds 3] [--json FILE]

Each round starts the program once on each system, one after the other, in an order that alternates from round to round.
A run reports its median step. The table has the median of the runs, and the ratio DeepSpeed / dsx. The model is shaped
like GPT-2 and has 19 million parameters. Goal: a ratio of at least 1.2.

The bench needs the packages of requirements.txt. The program finds dsx's `deepspeed` through `dsx_compat.activate()`,
and DeepSpeed's own without that call, so the environment must not have dsx-compat installed (`tools/dev.py bench` makes
such an environment).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from dsx_testkit.results import Table, add_json_option

SOURCES = Path(__file__).resolve().parents[1] / "src"


def program(args: argparse.Namespace) -> None:
    """Train on this rank; rank 0 prints its median step in seconds."""
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
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
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
    if accelerator.is_main_process:
        print(json.dumps({"step": statistics.median(times[3:])}))


def measure(system: str, stage: int, args: argparse.Namespace) -> float:
    """Median step of one run, in seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    options = {"system": system, "stage": stage, "layers": args.layers, "steps": args.steps, "length": args.length}
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    variables |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step"')]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{system}, stage {stage}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time of an Accelerate program on dsx and on DeepSpeed")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system per stage")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--system", choices=("dsx", "deepspeed"), help="run the program once, in this process")
    parser.add_argument("--stage", type=int, help="with --system: the ZeRO stage")
    add_json_option(parser)
    args = parser.parse_args()
    if args.system:
        program(args)
        return
    table = Table({"stage": "", "dsx": "{:.0f} ms", "DeepSpeed": "{:.0f} ms", "ratio": "{:.2f}x"})
    for stage in args.stages:
        steps: dict[str, list[float]] = {"dsx": [], "deepspeed": []}
        for round_ in range(args.rounds):
            for system in sorted(steps, reverse=round_ % 2 == 1):
                steps[system].append(measure(system, stage, args))
        dsx, deepspeed = (statistics.median(steps[system]) for system in ("dsx", "deepspeed"))
        ratio = deepspeed / dsx
        table.add(stage, dsx * 1e3, deepspeed * 1e3, ratio)
        table.goal(f"stage {stage} at least 1.2x DeepSpeed", f"{ratio:.2f}x", met=ratio >= 1.2)
    table.save(args.json)


if __name__ == "__main__":
    main()
