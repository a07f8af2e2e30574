"""A byte-level GPT learns one long text, the sources of the standard library, whose sequences are cut over 1, 2, ...
processes. Losses are those of one process; the memory of each process shrinks.

    python packages/dsx-activations/examples/long_text.py                        # 1, 2 and 4 processes
    python packages/dsx-activations/examples/long_text.py --ranks 1 2 --lengths 1024 4096 --steps 8 --json out.json

For every number of processes and every length it prints the losses and the most memory that a process took for training
beyond what it had before the first step.
"""

from __future__ import annotations

import argparse
import json
import resource
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from dsx_activations import checkpoint, linear_cross_entropy, run_in_tiles, sequence_parallel, token_mean
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + run_in_tiles(self.mlp, x, tiles=4)


class ByteGPT(nn.Module):
    """Its forward gives the sum of the losses of its tokens."""

    def __init__(self, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places(positions)
        for block in self.blocks:
            x = checkpoint(block, x)
        return linear_cross_entropy(x, self.head.weight, targets, chunk=256, reduction="sum")


def long_text(least: int) -> torch.Tensor:
    """At least so many bytes of the standard library's sources, in the order of their names."""
    found = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += file.read_bytes()
        if len(found) >= least:
            break
    return torch.frombuffer(found, dtype=torch.uint8).long()


def train(rank: int, world: int, folder: str, length: int, args: argparse.Namespace) -> None:
    """One process: it has its part of every sequence, and all parameters."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = ByteGPT(length, args.width, args.layers, args.heads)
    parallel = sequence_parallel(model, order=args.order, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, losses = long_text(args.steps * length + 1), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(args.steps):
        piece = text[None, step * length : (step + 1) * length + 1]
        inputs, targets = parallel.shard(piece[:, :-1]), parallel.shard(piece[:, 1:])  # shifted, then cut
        loss = token_mean(model(inputs, targets, parallel.positions(length)), targets.numel())
        loss.backward()
        for parameter in model.parameters():  # what DistributedDataParallel, dsx_zero and the engine do
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    Path(folder, f"rank{rank}.json").write_text(json.dumps({"losses": losses, "kilobytes": memory}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="bytes of a sequence")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--order", choices=("plain", "zigzag"), default="zigzag")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    rows = []
    for length in args.lengths:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(train, (ranks, folder, length, args), ranks)
                found = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
            most = max(one["kilobytes"] for one in found) / 1024
            rows.append({"length": length, "ranks": ranks, "losses": found[0]["losses"], "mebibytes": most})
            losses = " ".join(f"{loss:.5f}" for loss in found[0]["losses"])
            print(f"{length:>8} bytes, {ranks} processes: {most:8.1f} MiB in each, losses {losses}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
