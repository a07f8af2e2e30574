"""A run that goes on when ranks and machines come and go. Start it with any of the files beside it, or by hand:

dsx launch --elastic_training --num_procs 2 train.py --out runs/elastic
"""

import argparse

import dsx
import torch
from dsx import elasticity

CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 48, "micro_batch_sizes": [2, 4], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": None,
}


def main(arguments: list[str] | None = None) -> int:
    """Train; returns the number of updates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="runs/elastic")
    options, _ = parser.parse_known_args(arguments)

    elasticity.join(CONFIG)
    torch.manual_seed(0)
    x = torch.randn(1000, 8)
    data = torch.utils.data.TensorDataset(x, torch.sin(x).sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    engine, _, loader, _ = dsx.initialize(model=model, training_data=data, config=CONFIG)
    run = elasticity.resume(engine, options.out, snapshot_every=5, save_every=20)
    began, loss = engine.global_steps, torch.zeros(())
    while engine.global_steps < options.steps:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            if engine.global_steps >= options.steps:
                break
    engine.save_checkpoint(options.out)
    if engine.global_rank == 0:
        print(f"began after update {began} ({run.source or 'new'}), ended after {engine.global_steps}, loss {loss:.3f}")
    steps = engine.global_steps
    engine.destroy()
    return steps


if __name__ == "__main__":
    main()
