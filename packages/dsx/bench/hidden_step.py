"""The share of the CPU optimizer step that backward hides, on a CUDA device, or a simulated one where there is none.

    python packages/dsx/bench/hidden_step.py [--steps 9] [--gbps 2] [--clipped-every N]

Layers compute nothing much and sleep on the device, copies between device and host take the time of a link of `--gbps`
(on a simulated device), and the host steps for real. One engine with the default configuration (clipping to 1.0) and
the optimizer on the host is compared with two others: one that steps after backward, and one whose optimizer does
nothing, also after backward: it keeps no old values. The share that is hidden is (after - default) / (after - nothing),
both the medians of differences within one round. With `--clipped-every N` the gradients of every Nth step are
clipped, so that its update is undone and made again. The three take turns, in another order in each round. A simulated
device computes on the machine's cores, as the host's step does: run it alone, on at least three cores, or the step has
no core to hide on.

Optimizers in pages that are not locked (`--pageable`) get their gradients through a small page-locked buffer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from dsx_testkit.results import Table, add_json_option

KINDS = ("nothing", "default", "after")


def engines(layers: int, width: int, sleep_s: float, pageable: bool) -> dict[str, Any]:
    """The engines that are compared."""
    import dsx
    import dsx_ops
    import torch
    from torch import nn

    cycles = int(sleep_s * 1.5e9)

    def sleep_in_backward(grad: torch.Tensor) -> None:
        torch.cuda._sleep(2 * cycles)

    class Sleeps(nn.Linear):
        """Sleeps on the device: once in forward, twice as long in backward."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.cuda._sleep(cycles)
            y = x + super().forward(x)
            y.register_hook(sleep_in_backward)
            return y

    class Nothing(dsx_ops.FusedAdam):
        """Steps in no time."""

        def step_flat(self, *args: Any, **options: Any) -> None:
            """Nothing."""

    found = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(*(Sleeps(width, width, bias=False) for _ in range(layers)))
        offload = {"device": "cpu", "pin_memory": not pageable}
        if kind != "default":  # one that speculates copies old values, even where nothing is done to them
            offload["step_during_backward"] = False
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": width * width, "offload_optimizer": offload},
            "bf16": {"enabled": True},
            "steps_per_print": None,
        }
        optimizer = (lambda parameters: Nothing(parameters, lr=1e-5)) if kind == "nothing" else None
        if optimizer is None:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5}}
        found[kind] = dsx.initialize(model=model, optimizer=optimizer, config=config)[0]
    return found


def turns(step: int) -> tuple[str, ...]:
    """The order of a round: each engine comes first, second and last equally often."""
    first = step % len(KINDS)
    return KINDS[first:] + KINDS[:first]


def measure(args: argparse.Namespace) -> None:
    """Let the engines take turns, and print the share."""
    import torch

    torch.set_num_threads(1)
    made = engines(args.layers, args.width, args.sleep_ms / 1e3, args.pageable)
    x = torch.ones(1, args.width, device="cuda", dtype=torch.bfloat16)
    ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in range(args.steps + 3):
        clipped = args.clipped_every and step >= 3 and (step - 2) % args.clipped_every == 0
        for kind in turns(step):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = made[kind](x).float().square().mean() * (1e4 if clipped else 1e-6)
            made[kind].backward(loss)
            made[kind].step()
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            if step >= 3:
                ms[kind].append(took * 1e3)
            norm = made[kind].get_global_grad_norm()
            if norm is None or bool(clipped) != (norm > 1.0):
                raise SystemExit(f"step {step} of {kind}: got a norm of {norm}, expected {'>' if clipped else '<='} 1")
    nothing, default, after = (statistics.median(ms[kind]) for kind in KINDS)
    rounds = list(zip(*(ms[kind] for kind in KINDS), strict=True))
    gained = statistics.median(late - usual for _, usual, late in rounds)
    exposed = statistics.median(late - least for least, _, late in rounds)
    hidden = gained / exposed
    columns = {"ms without a step": "{:.0f}", "default": "{:.0f}", "step after backward": "{:.0f}"}
    table = Table({**columns, "ms of the host step": "{:.0f}", "hidden": "{:.1%}"}, "hidden-step")
    table.add(nothing, default, after, exposed, hidden)
    if not args.clipped_every:
        noise = hidden > 1.05  # less than no step at all: other work on the machine was longer than the step
        text = "nothing, the machine was busy" if noise else f"{hidden:.1%}"
        table.goal("at least 95 % of the host step hidden", text, met=None if noise else hidden >= 0.95)
    table.save(args.json)


def main() -> None:
    """Start the measurement, where there is no device on a simulated one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="steps of each that are timed")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--sleep-ms", type=float, default=15.0, help="of a layer's forward; backward takes twice that")
    parser.add_argument("--gbps", type=float, default=2.0, help="GB/s of the link")
    parser.add_argument("--clipped-every", type=int, default=0, metavar="N")
    parser.add_argument("--pageable", action="store_true", help="pin_memory false")
    parser.add_argument("--small", action="store_true", help="a size that only shows that it works")
    add_json_option(parser)
    args = parser.parse_args()
    if args.small:
        args.steps, args.layers, args.width, args.sleep_ms = 2, 4, 128, 2.0
    from dsx_core.device import accelerator_kind

    if accelerator_kind() == "cuda":
        measure(args)
        return
    pace = {"DSX_SIMCUDA_GBPS": str(args.gbps), "DSX_SIMCUDA_RACES": "0", "DSX_SIMCUDA_POISON": "0"}
    command = [sys.executable, "-m", "dsx_simcuda", "--mode", "eager", __file__, *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **pace}
    raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
