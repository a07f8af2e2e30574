"""Size on disk with all metadata, against fp32, for matrices of 4096 columns and a scale for each row.

python packages/dsx-compress/bench/sizes.py [--rows 4096] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from dsx_compress import compression_scheduler, export_model, init_compression
from dsx_testkit.results import Table, add_json_option
from safetensors.torch import save_file
from torch import nn

GOALS = {1: 31.0, 2: 15.5, 4: 7.8, 8: 3.97}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4096)
    add_json_option(parser)
    options = parser.parse_args()
    table = Table({"bits": "", "bytes of fp32": "{:,}", "bytes packed": "{:,}", "smaller than fp32": "{:.2f}x"})
    for bits, goal in GOALS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, options.rows, bias=False))
        config = {"weight_quantization": {
            "shared_parameters": {"enabled": True, "quantize_groups": options.rows, "quantize_weight_in_forward": True},
            "different_groups": {"g": {"params": {"start_bits": bits, "target_bits": bits}}}}}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            dense, packed = Path(folder) / "dense.safetensors", Path(folder) / "packed.safetensors"
            save_file(model.state_dict(), dense)
            compression_scheduler(init_compression(model, config), config)
            export_model(model, packed, config)
            before, after = dense.stat().st_size, packed.stat().st_size
        table.add(bits, before, after, before / after)
        table.goal(f"{bits} bits at least {goal}x", f"{before / after:.2f}x", met=before / after >= goal)
    table.save(options.json)


if __name__ == "__main__":
    main()
