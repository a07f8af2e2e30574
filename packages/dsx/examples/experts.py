"""A GPT whose feed-forward layers are mixtures of experts, spread over the processes.

    dsx launch --num_procs 2 experts.py --ep-size 2 --steps 50

Shows: dropless top-2 experts, the balancing loss, expert parallelism with ZeRO stage 2, the load of each expert.
"""

import argparse

import dsx
import torch
from dsx_moe import MoE
from gpt import GPT, GPTConfig, Windows, load_text
from torch import nn


class Experts(nn.Module):
    """Takes the place of a block's feed-forward layer. The balancing loss waits in `balance` for the training loop."""

    def __init__(self, width: int, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.moe = MoE(hidden_size=width, expert=expert, num_experts=4, ep_size=ep_size, k=2, drop_tokens=False)
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, self.balance, _ = self.moe(x)
        return out


class Model(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=2, width=96, heads=4, context=64))
        for block in self.gpt.blocks:
            block.feed = Experts(96, ep_size)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.gpt(tokens, targets)
        return loss + 0.01 * sum(block.feed.balance for block in self.gpt.blocks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ep-size", type=int, default=1)
    options, _ = parser.parse_known_args()

    dsx.init_distributed()
    torch.manual_seed(0)
    model = Model(options.ep_size)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": {"stage": 2},
    }
    training, _ = load_text(None)
    data = torch.utils.data.Subset(Windows(training, 64), range(16 * options.steps))
    engine, _, loader, _ = dsx.initialize(model=model, training_data=data, config=config)
    losses = []
    for tokens, targets in loader:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        load = [round(share, 2) for share in model.gpt.blocks[0].feed.moe.stats.load.tolist()]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; share of tokens per expert in the first block: {load}")


if __name__ == "__main__":
    main()
