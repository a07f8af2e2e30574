"""Train a byte-level GPT in three dimensions: pipeline, data and tensor parallelism.

    torchrun --nproc-per-node 8 examples/gpt_3d.py                      # 2 x 2 x 2
    torchrun --nproc-per-node 4 examples/gpt_3d.py --model 1
    python examples/gpt_3d.py --pipe 1 --data 1 --model 1               # one process

The model learns the bytes of this file. The printed losses are the same however the ranks are split.
"""

import argparse
from pathlib import Path

import dsx_comm
import dsx_pipe
import torch
from dsx_pipe.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from torch import nn

WIDTH, HEADS, LAYERS, SEQUENCE = 64, 4, 6, 64


class Embed(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.tokens = VocabParallelEmbedding(256, WIDTH, group=group)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)

    def forward(self, ids):
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.heads = HEADS // dsx_comm.get_world_size(group)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, group=group, parts=3)
        self.out = RowParallelLinear(WIDTH, WIDTH, group=group)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, group=group)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, group=group)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.reshape(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def main():
    parser = argparse.ArgumentParser()
    for axis in ("pipe", "data", "model"):
        parser.add_argument(f"--{axis}", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dsx_comm.init_distributed()
    topology = dsx_pipe.PipeModelDataParallelTopology(
        num_pp=arguments.pipe, num_mp=arguments.model, num_dp=arguments.data
    )
    grid = dsx_pipe.RankGrid(topology)
    slices = grid.model.group
    layers = [
        dsx_pipe.LayerSpec(Embed, slices),
        *(dsx_pipe.LayerSpec(Block, slices) for _ in range(LAYERS)),
        dsx_pipe.LayerSpec(nn.LayerNorm, WIDTH),
        dsx_pipe.LayerSpec(ColumnParallelLinear, WIDTH, 256, group=slices),
    ]
    module = dsx_pipe.PipelineModule(
        layers,
        topology=topology,
        loss_fn=lambda logits, labels: vocab_parallel_cross_entropy(logits, labels, slices),
        seed_layers=True,  # a layer gets the same values on whichever rank it is built
        schedule=arguments.schedule,
    )
    pipe = dsx_pipe.Pipeline(module, arguments.schedule, micro_batches=4, slice_group=slices)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        starts = torch.randint(0, len(text) - SEQUENCE - 1, (16,), generator=generator)
        rows = torch.stack([text[s : s + SEQUENCE + 1] for s in starts.tolist()])
        rows = rows.chunk(arguments.data)[grid.data.rank]
        loss = pipe.step(rows[:, :-1], rows[:, 1:])
        for parameter in module.parameters():
            dsx_comm.all_reduce(parameter.grad, op=dsx_comm.ReduceOp.AVG, group=grid.data.group)
        optimizer.step()
        optimizer.zero_grad()
        dsx_comm.all_reduce(loss, op=dsx_comm.ReduceOp.AVG, group=grid.data.group)
        if dsx_comm.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    report = pipe.report()
    if dsx_comm.get_rank() == 0:
        print(report)
    dsx_comm.destroy_process_group()


if __name__ == "__main__":
    main()
