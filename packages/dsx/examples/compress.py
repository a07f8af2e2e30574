"""Train a network, then halve its hidden layer and store it in 4 bits while it goes on learning.

    python compress.py --steps 400

Shows: the `compression_training` section with the engine, the report, an ordinary smaller model and its file.
"""

import argparse
from pathlib import Path

import dsx
import torch
from dsx_compress import compression_report, export_model, redundancy_clean
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/compress"))
    options, _ = parser.parse_known_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1))
    section = {
        "weight_quantization": {
            "shared_parameters": {
                "enabled": True,
                "schedule_offset": options.steps // 2,
                "quantize_weight_in_forward": True,
            },
            "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 4, "quantization_period": 10}}},
        },
        "row_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": options.steps // 4, "method": "topk"},
            "different_groups": {
                "hidden": {"params": {"dense_ratio": 0.5}, "modules": ["0"], "related_modules": [["2"]]}
            },
        },
    }
    config = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "compression_training": section,
    }
    engine, *_ = dsx.initialize(model=model, config=config)
    losses = []
    for _ in range(options.steps):
        x = torch.randn(64, 16)
        loss = (engine(x) - x.square().sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    print(compression_report(model).text())
    options.out.mkdir(parents=True, exist_ok=True)
    export_model(model, options.out / "small.safetensors", {"compression_training": section})
    small = redundancy_clean(model, {"compression_training": section})
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; small model: {small[0]}, {small[2]}")


if __name__ == "__main__":
    main()
