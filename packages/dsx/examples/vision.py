"""A small convolutional network tells shapes in noisy pictures apart; a micro-batch is accumulated four times.

    dsx launch --num_procs 2 vision.py --steps 100

Shows: images, gradient accumulation, BatchNorm buffers, OneCycle, accuracy over all processes.
"""

import argparse

import dsx
import dsx_comm
import torch
from torch import nn


def pictures(count: int, seed: int) -> torch.utils.data.TensorDataset:
    """`count` pictures [1, 16, 16] with noise; the label says what is drawn: a bar, a column, a cross or a frame."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.5 * torch.randn(count, 1, 16, 16, generator=generator)
    labels = torch.randint(4, (count,), generator=generator)
    places = torch.randint(4, 12, (count, 2), generator=generator)
    for image, label, (row, column) in zip(images, labels.tolist(), places.tolist()):
        if label in (0, 2):
            image[0, row, :] += 1.5
        if label in (1, 2):
            image[0, :, column] += 1.5
        if label == 3:
            image[0, [row - 3, row + 3], column - 3 : column + 4] += 1.5
            image[0, row - 3 : row + 4, [column - 3, column + 3]] += 1.5
    return torch.utils.data.TensorDataset(images, labels)


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options, _ = parser.parse_known_args()

    dsx.init_distributed()  # also on one process, for the sum at the end
    torch.manual_seed(0)
    config = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 3e-3, "cycle_first_step_size": options.steps // 2 + 1},
        },
        "zero_optimization": {"stage": 1},
    }
    data = pictures(64 * options.steps, seed=1)
    engine, _, loader, _ = dsx.initialize(model=network(), training_data=data, config=config)
    for images, labels in loader:
        engine.backward(nn.functional.cross_entropy(engine(images), labels))
        engine.step()

    engine.eval()
    images, labels = pictures(400, seed=2).tensors
    mine = slice(engine.global_rank, None, engine.world_size)  # each process judges its part
    with torch.no_grad():
        right = (engine(images[mine]).argmax(1) == labels[mine]).sum()
    dsx_comm.all_reduce(right)
    if engine.global_rank == 0:
        print(f"{engine.global_steps} updates, {right.item() / len(labels):.0%} of new pictures right")


if __name__ == "__main__":
    main()
