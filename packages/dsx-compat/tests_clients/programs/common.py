"""What the programs share: a small model, fixed data, the plain PyTorch curve, and where results go."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 8


def model() -> torch.nn.Module:
    """Some layers with weights of different sizes."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(16, 32),
        torch.nn.GELU(),
        torch.nn.Linear(32, 32),
        torch.nn.GELU(),
        torch.nn.Linear(32, 1),
    ]
    return torch.nn.Sequential(*layers)


def data(samples: int) -> torch.utils.data.TensorDataset:
    """Inputs and targets; the same on every rank."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 16, generator=made)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())


def plain_curve(
    steps: int, *, micro: int, accumulation: int = 1, lr=lambda step: 0.01, clip: float = 0.0
) -> list[float]:
    """Mean loss of each update of AdamW in one process on the global batch, in the order of the data."""
    net, per_update = model(), micro * WORLD * accumulation
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, y = data(steps * per_update).tensors
    curve = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        part = slice(step * per_update, (step + 1) * per_update)
        loss = torch.nn.functional.mse_loss(net(x[part]), y[part])
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def forget_checkpoints() -> None:
    """Make engines load nothing and say that they did: what a comparison after a resume has to notice."""
    import dsx

    dsx.Engine.load_checkpoint = lambda self, folder, *args, **kwargs: (str(folder), {})


def skip_one_update() -> None:
    """Make each engine leave out its third update: what a comparison of curves has to notice."""
    import dsx

    step, taken = dsx.Engine.step, [0]

    def with_a_gap(self, *args, **kwargs):
        taken[0] += 1
        return self.zero_grad() if taken[0] == 3 else step(self, *args, **kwargs)

    dsx.Engine.step = with_a_gap


def close(got: list[float], expected: list[float], what: str) -> None:
    """Equal to rounding of fp32."""
    torch.testing.assert_close(
        torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9,
        msg=lambda text: f"{what}: got {got}, expected {expected}\n{text}",
    )  # fmt: skip


def report(**facts: object) -> None:
    """Leave what this rank found for the test."""
    folder = os.environ.get("CLIENT_RESULTS")
    if folder:
        Path(folder, f"rank{RANK}.json").write_text(json.dumps(facts))
