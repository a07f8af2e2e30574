"""Step time of DDP and FSDP2 on a GPT of 19 M parameters: the dsx backend against gloo, in the same processes, step by
step in turn.

    python packages/dsx-comm/bench/training.py --ranks 2 --steps 9

Losses must be equal to the last bit where the arithmetic is (2 ranks: a sum of two has one order). Goals: never slower,
FSDP2 >= 1.15x.
"""

import argparse
import os
import statistics
import tempfile
import time

import dsx_comm  # noqa: F401  (registers the backend)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 512, 6, 8, 256, 64


class Gpt(nn.Module):
    """Six blocks of 512: 19 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def build(kind: str, group: dist.ProcessGroup) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Gpt()
    if kind == "ddp":
        model = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    groups = {name: dist.new_group(backend=name) for name in ("dsx", "gloo")}
    for kind in args.kinds.split(","):
        runs = {name: build(kind, group) for name, group in groups.items()}
        losses: dict[str, list[float]] = {name: [] for name in runs}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(args.steps + 1):
            tokens = torch.randint(
                VOCABULARY, (args.batch, LENGTH + 1), generator=torch.Generator().manual_seed(i * 8 + rank)
            )
            for name, (model, optimizer) in runs.items():
                dist.barrier()
                began = time.perf_counter()
                losses[name].append(step(model, optimizer, tokens))
                if i:
                    times[name].append((time.perf_counter() - began) * 1e3)
        if rank == 0:
            ours, theirs = (statistics.median(times[n]) for n in ("dsx", "gloo"))
            worst = max(abs(a - b) for a, b in zip(losses["dsx"], losses["gloo"]))
            print(
                f"{kind:<6} dsx {ours:8.1f} ms  gloo {theirs:8.1f} ms  ratio {theirs / ours:.2f}  losses differ by"
                f" {worst:g}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--kinds", default="ddp,fsdp2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, os.path.join(folder, "store")), args.ranks)


if __name__ == "__main__":
    main()
