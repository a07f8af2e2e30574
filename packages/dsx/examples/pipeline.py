"""A GPT in stages: the list of its layers is cut, micro-batches travel through the stages.

    dsx launch --num_procs 2 pipeline.py --stages 2 --schedule zb-h1 --steps 50

Shows: a model as a list of layers, tied weights on two stages, `train_batch`, the bubble that was measured.
"""

import argparse

import dsx
import torch
from gpt import Windows, load_text
from torch import nn

WIDTH, CONTEXT = 96, 64


class Embedding(nn.Embedding):
    """Bytes to vectors; the last layer multiplies by the same table."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def logits(table: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ table.weight.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        unseen = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return self.layer(x, src_mask=unseen)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    options, _ = parser.parse_known_args()

    dsx.init_distributed()
    torch.manual_seed(0)
    layers = [
        dsx.pipe.TiedLayerSpec("table", Embedding, 256, WIDTH),
        *(dsx.pipe.LayerSpec(Block) for _ in range(4)),
        dsx.pipe.LayerSpec(nn.LayerNorm, WIDTH),
        dsx.pipe.TiedLayerSpec("table", Embedding, 256, WIDTH, forward_fn=logits),
    ]
    module = dsx.pipe.PipelineModule(  # seed_layers: a layer starts alike whatever the split
        layers,
        num_stages=options.stages,
        loss_fn=loss_of,
        partition_method="parameters",
        schedule=options.schedule,
        seed_layers=True,
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    training, _ = load_text(None)
    engine, *_ = dsx.initialize(model=module, training_data=Windows(training, CONTEXT), config=config)
    losses = [float(engine.train_batch()) for _ in range(options.steps)]
    if engine.global_rank == 0:
        print(f"{options.stages} stage(s), {options.schedule}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
