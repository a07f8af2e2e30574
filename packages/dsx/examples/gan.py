"""Two models that train each other, each with an engine of its own: a generator learns to draw points of a ring.

    dsx launch --num_procs 2 gan.py --steps 400

Shows: two engines, gradients that pass through one engine's model into another's, different stages.
"""

import argparse

import dsx
import torch
from torch import nn


def engine_of(model: nn.Module, stage: int) -> dsx.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.5, 0.9]}},
        "zero_optimization": {"stage": stage},
    }
    return dsx.initialize(model=model, config=config)[0]


def ring(count: int, generator: torch.Generator) -> torch.Tensor:
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    options, _ = parser.parse_known_args()

    torch.manual_seed(0)
    drawing = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    judging = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator, critic = engine_of(drawing, stage=2), engine_of(judging, stage=1)
    score = nn.functional.binary_cross_entropy_with_logits
    numbers = torch.Generator().manual_seed(1 + generator.global_rank)
    real, drawn = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(options.steps):
        points = generator(torch.randn(64, 4, generator=numbers))
        loss = score(critic(ring(64, numbers)), real) + score(critic(points.detach()), drawn)
        critic.backward(loss)
        critic.step()
        generator.backward(score(critic(points), real))
        critic.zero_grad()  # the generator's backward has reached the critic, too
        generator.step()
    with torch.no_grad():
        distance = generator(torch.randn(500, 4, generator=numbers)).norm(dim=1)
    if generator.global_rank == 0:
        print(f"after {options.steps} steps points are {distance.mean():.2f} +- {distance.std():.2f} from the centre")


if __name__ == "__main__":
    main()
