"""`engine.weights`: the whole model for other programs, with experts and slices of tensors on other ranks; and
checkpoints of states that sleep.
"""

from __future__ import annotations

import dsx
import dsx_comm
import dsx_zero
import pytest
import torch
from dsx.engine import EngineArgumentError
from dsx_checkpoint.whole import WholeTensors
from dsx_moe import MoE, PackedExperts
from dsx_testkit import run_ranks
from safetensors.torch import load_file
from torch import nn

HIDDEN = 8


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    def __init__(self, packed):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, PackedExperts(4, HIDDEN, 12) if packed else (lambda i: Feed()), 4, 2, k=2)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        out, aux, _ = self.moe(self.first(x))
        return (out * self.scale).square().mean() + 0.1 * aux


class Slices(nn.Module):
    """A matrix cut by columns and one by rows; the bias is on all ranks."""

    def __init__(self, group, rank, size, told=True):
        super().__init__()
        torch.manual_seed(3)
        up, down = torch.randn(16, HIDDEN), torch.randn(HIDDEN, 16)
        self.up, self.down = nn.Parameter(up.chunk(size)[rank].clone()), nn.Parameter(down.chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        for dim, parameter in enumerate((self.up, self.down)):
            parameter.tensor_model_parallel = True
            if told:
                parameter.partition_dim, parameter.partition_stride = dim, 1
        self.group = group

    def forward(self, x):
        # Every term is this rank's alone, and that of the bias is equal on all ranks that hold slices.
        return torch.tanh(x @ self.up.T).square().mean() + self.down.square().mean() + (x + self.bias).square().mean()


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def trained(engine, rank):
    for step in range(2):
        x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(x))
        engine.step()


def check(engine, folder, asleep, world, place=0):
    """Buckets and boxes against the checkpoint, which has whole tensors under their names."""
    if asleep:
        engine.offload_states()
    found = {}
    for bucket in engine.weights.buckets(bucket_bytes=900):
        found |= {name: value.clone() for name, value in bucket.items()}
    engine.save_checkpoint(str(folder), tag="one")
    stored = WholeTensors.of(folder / "one")
    assert set(found) == set(stored)
    for name, value in found.items():
        assert torch.equal(value, stored[name]), name
    mine = [(s.name, s.offset, s.values.clone()) for s in engine.weights.shards()]
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, mine)
    count = {name: torch.zeros(value.shape, dtype=torch.int64) for name, value in found.items()}
    for name, offset, values in (one for rank in everyone for one in rank):
        at = tuple(slice(start, start + size) for start, size in zip(offset, values.shape))
        assert torch.equal(found[name][at], values), name
        count[name][at] += 1
    assert all(bool((times == 1).all()) for times in count.values())
    before, mark = found, engine.weights.mark()
    engine.reload_states()
    trained(engine, 5 + place)
    packets = [None] * world
    torch.distributed.all_gather_object(packets, mark.pack())
    for packet in packets:
        dsx_zero.export.apply_changes(packet, before)
    for bucket in engine.weights.buckets():
        assert all(torch.equal(before[name], value) for name, value in bucket.items())
    engine.destroy()


def experts(rank, world, stage, packed, asleep, folder):
    engine, *_ = dsx.initialize(model=Experts(packed), config=config(stage))
    trained(engine, rank)
    check(engine, folder, asleep, world, rank)


@pytest.mark.parametrize(
    ("stage", "world", "packed", "asleep"), [(2, 2, False, True), (3, 4, True, False), (1, 2, True, True)]
)
def test_experts_of_all_ranks_are_joined(stage, world, packed, asleep, tmp_path):
    run_ranks(experts, world, stage, packed, asleep, tmp_path)


def slices(rank, world, stage, asleep, told, folder):
    mpu = dsx_comm.Mpu(dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (world // 2, 2))))
    model = Slices(mpu.get_model_parallel_group(), mpu.get_model_parallel_rank(), 2, told)
    engine, *_ = dsx.initialize(model=model, config=config(stage), mpu=mpu)
    if not told:
        with pytest.raises(EngineArgumentError, match="nothing says which; give its module a method parameter_places"):
            engine.weights.buckets()
        return
    trained(engine, mpu.get_data_parallel_rank())
    check(engine, folder, asleep, world)


@pytest.mark.parametrize(("stage", "world", "asleep"), [(1, 2, False), (3, 4, True)])
def test_slices_of_tensors_are_joined(stage, world, asleep, tmp_path):
    run_ranks(slices, world, stage, asleep, True, tmp_path)


def test_slices_that_say_nothing_are_refused(tmp_path):
    run_ranks(slices, 2, 1, False, False, tmp_path)


def written_asleep(rank, world, stage, folder):
    """The checkpoint of an engine that sleeps has the bits of one that is awake, and training goes on."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).square().mean()

    engine, *_ = dsx.initialize(model=Loss(), config=config(stage, bf16={"enabled": stage > 1}))
    x = torch.randn(4, HIDDEN).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x))
    engine.step()
    engine.save_checkpoint(f"{folder}/awake")
    engine.offload_states()
    engine.save_checkpoint(f"{folder}/asleep")
    for refused in (engine.module_state_dict, lambda: engine.save_16bit_model(f"{folder}/weights")):
        with pytest.raises(dsx_zero.ZeroStateError, match=r"call reload_states\(\) on every rank"):
            refused()
    engine.reload_states()
    engine.backward(engine(x))
    engine.step()
    engine.destroy()
    files = [sorted(p for p in (folder / which).rglob("*.safetensors")) for which in ("awake", "asleep")]
    assert files[0] and [p.name for p in files[0]] == [p.name for p in files[1]]
    for awake, asleep in zip(*files):  # weights, masters and optimizer states
        first, second = load_file(awake), load_file(asleep)
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (3, 2)])
def test_states_are_saved_asleep(stage, world, tmp_path):
    run_ranks(written_asleep, world, stage, tmp_path)
