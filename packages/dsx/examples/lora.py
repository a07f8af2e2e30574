"""Fine-tune a model with LoRA: its weights are frozen, and small matrices beside them are trained and saved.

    dsx launch --num_procs 2 lora.py --steps 100

Shows: frozen parameters at stage 3, adapters by hand (peft works as well), what is trained in a file of its own.
"""

import argparse
from pathlib import Path

import dsx
import dsx_zero
import torch
from gpt import GPT, GPTConfig, Windows, load_text
from safetensors.torch import save_file
from torch import nn


class LoRA(nn.Module):
    """y = frozen(x) + B A x, with A of `rank` rows; B starts at zero, so that nothing changes at first."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    options, _ = parser.parse_known_args()

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=options.width, heads=4, context=64)).requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LoRA(block.attention.qkv)
        block.attention.out = LoRA(block.attention.out)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 3},
    }
    training, _ = load_text(None)
    data = torch.utils.data.Subset(Windows(training, 64), range(16 * options.steps))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, _, loader, _ = dsx.initialize(model=model, model_parameters=trained, training_data=data, config=config)
    losses = []
    for tokens, targets in loader:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with dsx_zero.GatheredParameters(list(named.values())):  # on every process
        adapter = {name: p.detach().clone() for name, p in named.items()}
    if engine.global_rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        save_file(adapter, options.out / "adapter.safetensors")
        share = sum(p.numel() for p in adapter.values()) / sum(p.numel() for p in model.parameters())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {share:.1%} of the parameters trained and saved")


if __name__ == "__main__":
    main()
