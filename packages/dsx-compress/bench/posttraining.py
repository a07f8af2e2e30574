"""Time of post-training quantisation with calibration, for a GPT of 85 M parameters. Goal: <= 60 s on two cores.

python packages/dsx-compress/bench/posttraining.py [--width 768] [--layers 12] [--steps 4] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from dsx_compress import PostTrainingConfig, quantize_post_training
from dsx_testkit.results import Table, add_json_option

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from text_lab import CONTEXT, Model


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="training steps of each block")
    parser.add_argument("--threads", type=int, default=2)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = Model(options.width, options.layers, options.heads)
    count = sum(p.numel() for p in model.parameters())
    batches = [torch.randint(0, 256, (4, CONTEXT)) for _ in range(4)]
    group = min(64, options.width)
    how = PostTrainingConfig(bits=8, group_size=group, activation_bits=8, blocks="layers", steps=options.steps)
    start = time.perf_counter()
    report = quantize_post_training(model, batches, how)
    seconds = time.perf_counter() - start
    better = sum(block.after < block.before for block in report.blocks)
    columns = dict.fromkeys(("layers quantised", "steps per block", "blocks that got nearer"), "")
    table = Table({"parameters": "{:.1f} M", **columns, "seconds": "{:.1f}"})
    nearer = f"{better} of {len(report.blocks)}"
    table.add(count / 1e6, len(report.quantized), options.steps, nearer, seconds)
    table.goal("at most 60 s for 85 M parameters", f"{seconds:.1f} s", met=seconds <= 60 if count > 80e6 else None)
    table.save(options.json)


if __name__ == "__main__":
    main()
