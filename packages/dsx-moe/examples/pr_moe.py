"""PR-MoE, a plain mixture of experts and a dense model, trained equally: parameters and held-out losses.

    python pr_moe.py [--train-iters 300] [other flags of gpt_moe.py]

PR-MoE (arXiv 2201.05596) gives later layers more experts (a pyramid), and puts a dense layer beside every layer of
experts (the residual). It needs fewer parameters for the same loss.
"""

from __future__ import annotations

import argparse

import dsx_comm
import gpt_moe

MODELS: dict[str, tuple[list[int], str]] = {
    "dense": ([1], "standard"),
    "MoE, 8 experts": ([8], "standard"),
    "Residual-MoE, 8 experts": ([8], "residual"),
    "PR-MoE, 4 and 8 experts": ([4, 8], "residual"),
}


def main() -> None:
    """Train all models and print a table."""
    args = gpt_moe.parser().parse_args()
    dsx_comm.init_distributed()
    rows = []
    for name, (experts, kind) in MODELS.items():
        mine = argparse.Namespace(**{**vars(args), "num_experts": experts, "mlp_type": kind})
        model = gpt_moe.build(mine)
        curve = gpt_moe.train(model, mine)
        rows.append((name, sum(p.numel() for p in model.parameters()), curve[-1]))
    if dsx_comm.get_rank() == 0:
        print("\n| model | parameters on a rank | held-out bits per byte |\n|---|---|---|")
        for name, size, loss in rows:
            print(f"| {name} | {size:,} | {loss:.3f} |")


if __name__ == "__main__":
    main()
