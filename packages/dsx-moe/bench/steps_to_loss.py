"""A dense model and a mixture of experts with equal active flops, on real text: losses, and steps to the dense loss.

    python packages/dsx-moe/bench/steps_to_loss.py [--train-iters 600 --seeds 0 1 2 --json FILE] [flags of gpt_moe.py]

A top-1 expert of the dense layer's size needs as many flops per token as the dense layer. The steps that the mixture
needs to the dense model's last held-out loss are interpolated between evaluations. The text is Python's library.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import dsx_comm
from dsx_testkit.results import Table, add_json_option

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt_moe


def steps_to(curve: list[float], target: float, interval: int) -> float:
    """Steps at which a falling curve reaches the target; infinite if it does not."""
    for i, value in enumerate(curve):
        if value <= target:
            if i == 0:
                return float(interval)
            before = curve[i - 1]
            return interval * (i + (before - target) / (before - value))
    return float("inf")


def main() -> None:
    """Train both models from each seed and print a table."""
    parser = gpt_moe.parser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add_json_option(parser)
    args = parser.parse_args()
    dsx_comm.init_distributed()
    columns = {"seed": "", "dense, bits per byte": "{:.3f}", "MoE": "{:.3f}"}
    table = Table({**columns, "steps of dense / steps of MoE to dense's loss": "{:.2f}"})
    ratios = []
    for seed in args.seeds:
        curves = []
        for experts in ([1], args.num_experts):
            mine = argparse.Namespace(**{**vars(args), "num_experts": experts, "seed": seed, "quiet": True})
            curves.append(gpt_moe.train(gpt_moe.build(mine), mine))
        dense, mixture = curves
        ratios.append(args.train_iters / steps_to(mixture, dense[-1], args.eval_interval))
        table.add(seed, dense[-1], mixture[-1], ratios[-1])
    median = statistics.median(ratios)
    table.goal("at least 1.3x fewer steps in the median", f"{median:.2f}x", met=median >= 1.3)
    table.save(args.json)


if __name__ == "__main__":
    main()
