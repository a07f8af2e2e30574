"""Counts the bytes that a dropless layer sends under skewed routing, beside the exact number and a padded layer's.

    python packages/dsx-moe/bench/traffic.py [--ranks 4 --tokens 4096 --hidden 512 --experts 8 --k 1 --json FILE]

Nothing is timed. The exact number counts the routed rows that have to leave their rank, there and back. A padded layer
of capacity factor 1.25 sends its whole buffer of [experts, capacity] rows, however many of them are used.
"""

from __future__ import annotations

import argparse

import dsx_comm
import torch
from dsx_moe import MoE
from dsx_moe.gating import expert_capacity
from dsx_testkit import run_ranks
from dsx_testkit.results import Table, add_json_option
from torch import nn


def forward(rank: int, world: int, args: argparse.Namespace, skew: float) -> tuple[int, list[int]]:
    """(bytes sent in forward, rows routed to each rank)."""
    dsx_comm.init_distributed()
    torch.manual_seed(rank)
    layer = MoE(args.hidden, nn.Identity(), args.experts, world, k=args.k, drop_tokens=False)
    with torch.no_grad():
        layer.gate.wg.weight[0] += skew
    with dsx_comm.count_traffic() as traffic, torch.no_grad():
        layer(torch.rand(args.tokens, args.hidden))
    if layer.stats is None:
        raise RuntimeError("the layer has not run")
    return int(traffic.sent_bytes()), layer.stats.kept.view(world, -1).sum(1).tolist()


def main() -> None:
    """Count for several degrees of skew and print a table."""
    parser = argparse.ArgumentParser()
    for name, value in {"ranks": 4, "tokens": 4096, "hidden": 512, "experts": 8, "k": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    add_json_option(parser)
    args = parser.parse_args()
    table = Table({"skew": "", "largest share of a rank": "{:.2f}", "sent MB": "{:.2f}", "/ exact": "{:.4f}",
                   "/ capacity 1.25": "{:.3f}"})  # fmt: skip
    worst = least = 0.0
    for skew in (0.0, 0.001, 0.003, 0.01):
        results = run_ranks(forward, args.ranks, args, skew, timeout=300)
        row = args.hidden * 4
        away = sum(rows[d] for r, (_, rows) in enumerate(results) for d in range(args.ranks) if d != r)
        exact, sent = 2 * away * row, sum(found for found, _ in results)
        capacity = expert_capacity(args.tokens, args.experts, 1.25 * args.k)
        padded = 2 * args.ranks * (args.ranks - 1) * (args.experts // args.ranks) * capacity * row
        share = max(sum(rows[d] for _, rows in results) for d in range(args.ranks)) / (
            args.ranks * args.tokens * args.k
        )
        table.add(skew, share, sent / 1e6, sent / exact, sent / padded)
        worst, least = max(worst, sent / exact), max(least, sent / padded)
    table.goal("at most 1.01 of the exact bytes", f"{worst:.4f}", met=worst <= 1.01)
    table.goal("at least 19 % fewer than a capacity of 1.25", f"{1 - least:.0%}", met=least <= 0.81)
    table.save(args.json)


if __name__ == "__main__":
    main()
