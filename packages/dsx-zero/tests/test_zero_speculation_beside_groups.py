"""Speculative steps on the host where ranks hold different parameters (experts, slices of tensors), and where a rank is
killed under them. The oracle is the plain order, bit by bit.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import textwrap

import dsx_zero
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks
from dsx_testkit.early_steps import CountedSteps, everything, same_bits, strengths, update
from torch import nn

pytest.importorskip("dsx_ops")

WIDTH = 8


class Exchanged(torch.autograd.Function):
    """An all-to-all of equal parts, whose backward is itself."""

    @staticmethod
    def forward(ctx, x, group):
        import dsx_comm

        ctx.group, out = group, torch.empty_like(x)
        dsx_comm.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchanged.apply(grad, ctx.group), None


class Summed(torch.autograd.Function):
    """A sum over the slices, of values or (`backward`) of gradients."""

    @staticmethod
    def forward(ctx, x, group, backward):
        import dsx_comm

        ctx.group, ctx.sums, x = group, backward, x.clone()
        if not backward:
            dsx_comm.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        import dsx_comm

        grad = grad.clone()
        if ctx.sums:
            dsx_comm.all_reduce(grad, group=ctx.group)
        return grad, None, None


class Expert(nn.Module):
    """A dense layer, then one expert of this rank, which sees an equal part of all tokens of its group."""

    def __init__(self, group):
        super().__init__()
        self.dense, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.expert.weight.allreduce, self.expert.weight.group_name = False, "ep_size_2"
        self.group = group

    def forward(self, x):
        hidden = torch.tanh(self.dense(x))
        return x + Exchanged.apply(self.expert(Exchanged.apply(hidden, self.group)), self.group)


class Slice(nn.Module):
    """A norm, a matrix cut by columns, one cut by rows."""

    def __init__(self, group):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Parameter(torch.randn(5, WIDTH) * 0.3), nn.Parameter(torch.randn(WIDTH, 5) * 0.3)
        self.up.tensor_model_parallel = self.down.tensor_model_parallel = True
        self.group = group

    def forward(self, x):
        hidden = torch.tanh(Summed.apply(self.norm(x), self.group, True) @ self.up.T)
        return x + Summed.apply(hidden @ self.down.T, self.group, False)


class Net(nn.Module):
    """Its gradients are as large as `strength`, which a test sets."""

    strength = 1.0

    def __init__(self, block, group, place):
        super().__init__()
        torch.manual_seed(10 + place)  # what this rank holds alone
        middle = [block(group) for _ in range(2)]
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH)])
        torch.manual_seed(4)  # what all ranks have
        for name, parameter in self.named_parameters():
            own = "expert" in name or name.endswith((".up", ".down"))
            if not own and parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
            elif not own and "norm" not in name:
                nn.init.zeros_(parameter)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean() * self.strength


def fused(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2, weight_decay=0.1)


def parts(what):
    """The block, its group, this rank's place in it, what `shard` is given, and which data this rank sees."""
    import dsx_comm
    from dsx_comm import parallel_groups

    world = torch.distributed.get_world_size()
    if what == "experts":
        parallel_groups.create_expert_and_data_parallel(2)
        group = parallel_groups.get_expert_parallel_group("ep_size_2")
        place = parallel_groups.get_expert_parallel_rank("ep_size_2")
        return Expert, group, place, {}, torch.distributed.get_rank()
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (world // 2, 2)))
    mpu = dsx_comm.Mpu(registry)
    return Slice, mpu.get_model_parallel_group(), registry.axis("model").rank, {"mpu": mpu}, registry.axis("data").rank


def built(early, block, group, place, given, stage, dtype, store):
    config = {
        "stage": stage,
        "reduce_bucket_size": WIDTH * WIDTH + WIDTH,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu" if store is None else "nvme", "step_during_backward": early},
    }
    if store is not None:
        config["offload_optimizer"]["nvme_path"] = "unused"
    return dsx_zero.shard(Net(block, group, place).to(dtype), fused, config=config, store=store, **given)


def sequences(rank, world, what, stage, dtype, number, micro, folder):
    """Random sequences of three steps, each with the same bits as the plain order."""
    chance = random.Random(f"{what} {stage} {dtype}")
    block, group, place, given, data = parts(what)
    stores = [None, None]
    if folder is not None:
        import dsx_nvme

        stores = [dsx_nvme.TensorStore(f"{folder}/{on}.{rank}") for on in (False, True)]
    plain = built(False, block, group, place, given, stage, dtype, stores[0])
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedSteps(patch)
        early = built(True, block, group, place, given, stage, dtype, stores[1])
        for sequence in range(number):
            for step, strength in enumerate(strengths(chance, 3, finite=dtype == torch.float32)):
                scale = chance.choice((1.0, 8.0, 3.0))
                generator = torch.Generator().manual_seed(1000 * sequence + 100 * step + data)
                batches = [torch.randn(4, WIDTH, generator=generator).to(dtype) for _ in range(micro)]
                said = update(*plain, batches, strength, scale)
                assert repr(said) == repr(update(*early, batches, strength, scale, counted))
            if number < 20 or sequence % 50 == 49:
                assert same_bits(everything(*plain), everything(*early)), sequence
        assert same_bits(everything(*plain), everything(*early))
    for _, optimizer in (plain, early):
        optimizer.release()
    return counted.announced, counted.stepped, counted.undone


CASES = [
    ("experts", 2, torch.bfloat16, 2, 1, False),
    ("experts", 3, torch.float16, 2, 1, True),
    ("slices", 2, torch.float32, 2, 2, False),
    ("slices", 3, torch.bfloat16, 4, 1, True),
    ("experts", 1, torch.float32, 4, 2, False),
]


@pytest.mark.parametrize(("what", "stage", "dtype", "world", "micro", "disk"), CASES)
def test_random_sequences_have_the_bits_of_the_plain_order(what, stage, dtype, world, micro, disk, tmp_path):
    folder = str(tmp_path) if disk else None
    for announced, stepped, undone in run_ranks(sequences, world, what, stage, dtype, 12, micro, folder):
        assert announced > 5 and stepped > 10 and undone > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("what", "stage", "dtype", "world", "micro", "disk"), CASES)
def test_a_thousand_random_sequences(what, stage, dtype, world, micro, disk, tmp_path):
    folder = str(tmp_path) if disk else None
    found = run_ranks(sequences, world, what, stage, dtype, 1000, micro, folder, timeout=1500)
    assert all(announced > 1000 and undone > 200 for announced, _, undone in found)


# A rank that ends -----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, torch, dsx_comm, dsx_ops, dsx_zero
import torch.distributed as dist
rank, port, backend, how = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.manual_seed(0)

class Dies(dsx_ops.FusedAdam):
    steps = 0

    def step_flat(self, param, *args, **options):  # on the thread that steps units during backward
        super().step_flat(param, *args, **options)
        Dies.steps += 1
        if rank == 1 and Dies.steps == 7 and how == "in the step":
            os.kill(os.getpid(), signal.SIGKILL)

model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))
config = {"stage": 2, "reduce_bucket_size": 1640, "offload_optimizer": {"device": "cpu", "step_during_backward": True}}
model, optimizer = dsx_zero.shard(model, lambda p: Dies(p, lr=1e-3), config=config)
for step in range(8):
    said = optimizer.step_during_backward(max_norm=1.0)
    (model(torch.ones(2, 40)).square().mean() * 1e-3).backward()
    if step == 2:
        print("speculated", said, flush=True)
        if rank == 1 and how == "before the norm":
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step(max_norm=1.0)
    optimizer.zero_grad()
"""


@pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")
@pytest.mark.parametrize("how", ["in the step", "before the norm"])
def test_a_rank_that_is_killed_under_speculation_is_named(how, tmp_path):
    import dsx_comm  # noqa: F401  knows the backend "dsx"

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-W", "ignore", str(script)]
    jobs = [
        subprocess.Popen([*command, str(rank), str(port), "dsx", how], stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    try:
        said = [job.communicate(timeout=90) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [1, -signal.SIGKILL], said
    assert how == "in the step" or "speculated True" in said[0][0], said
    last = said[0][1].strip().splitlines()[-1]
    assert "PeerLostError" in last and "rank(s) 1 ended while rank 0 waited" in last, said[0][1]
