"""Engines of models that are not whole on each rank: slices of tensors by an mpu, experts by marks, and checkpoints
of both.
"""

import dsx
import dsx_comm
import pytest
import torch
from dsx.checkpoint import open_checkpoint
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

WIDTH, STEPS = 8, 3


def batch(place, step):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


class Summed(torch.autograd.Function):
    """A sum over the slices on the way there (`back` False), or of the gradients on the way back."""

    @staticmethod
    def forward(ctx, x, group, back):
        ctx.group, ctx.back = group, back
        return x.view_as(x) if back else Summed.total(x, group)

    @staticmethod
    def backward(ctx, grad):
        return (Summed.total(grad, ctx.group) if ctx.back else grad), None, None

    @staticmethod
    def total(x, group):
        x = x.clone()
        dsx_comm.all_reduce(x, group=group)
        return x


class Sliced(nn.Module):
    """A matrix cut by columns and one cut by rows; the bias is on all ranks. `told`: the slices say how they were
    cut.
    """

    def __init__(self, group=None, rank=0, size=1, told=True):
        super().__init__()
        torch.manual_seed(3)
        up, down = torch.randn(16, WIDTH) * 0.3, torch.randn(WIDTH, 16) * 0.3
        self.up, self.down = nn.Parameter(up.chunk(size)[rank].clone()), nn.Parameter(down.chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        for dim, parameter in enumerate((self.up, self.down)):
            parameter.tensor_model_parallel = size > 1
            if told:
                parameter.partition_dim, parameter.partition_stride = dim, 1
        self.group, self.size = group, size

    def forward(self, x):
        if self.size == 1:
            return torch.tanh(x @ self.up.T) @ self.down.T + self.bias
        hidden = torch.tanh(Summed.apply(x, self.group, True) @ self.up.T)
        return Summed.apply(hidden @ self.down.T, self.group, False) + self.bias


def config(stage):
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
        "gradient_clipping": 0.05,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def train(engine, place, start=0):
    losses, norms = [], []
    for step in range(start, start + STEPS):
        x, y = batch(place, step)
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def one_process():
    model = Sliced()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses, norms = [[], []], []
    for step in range(2 * STEPS):
        for place in range(2):
            x, y = batch(place, step)
            loss = F.mse_loss(model(x), y)
            (loss / 2).backward()
            losses[place].append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def slices(rank, world, stage, told, folder):
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (2, 2)))
    mpu = dsx_comm.Mpu(registry)

    def build():
        model = Sliced(mpu.get_model_parallel_group(), mpu.get_model_parallel_rank(), 2, told)
        return dsx.initialize(model=model, config=config(stage), mpu=mpu)[0]

    engine, place = build(), mpu.get_data_parallel_rank()
    assert (engine.dp_world_size, engine.mp_world_size) == (2, 2)
    losses, norms = train(engine, place)
    engine.save_checkpoint(folder, tag="middle")
    with pytest.raises(ValueError, match="save_checkpoint"):
        engine.save_16bit_model(folder)
    again = build()
    again.load_checkpoint(folder, tag="middle")
    more = train(again, place, STEPS)
    again.save_checkpoint(folder, tag="end")
    return losses + more[0], norms + more[1], place


@pytest.mark.parametrize(("stage", "told"), [(0, True), (1, False), (3, True)])
def test_slices_by_an_mpu_train_save_and_load(stage, told, tmp_path):
    losses, norms, parameters = one_process()
    for got, got_norms, place in run_ranks(slices, 4, stage, told, str(tmp_path)):
        assert got == pytest.approx(losses[place], rel=1e-4)
        assert got_norms == pytest.approx(norms, rel=1e-4)
    reader = open_checkpoint(tmp_path, "end")
    if told:  # whole matrices, for any number of slices
        for name, value in parameters.items():
            torch.testing.assert_close(reader.whole(name), value, rtol=1e-4, atol=1e-5)
        engine = dsx.initialize(model=Sliced(), config={**config(0), "gradient_accumulation_steps": 2})[0]
        engine.load_checkpoint(str(tmp_path), tag="end")
        torch.testing.assert_close(engine.module.up.detach(), parameters["up"], rtol=1e-4, atol=1e-5)
    else:
        assert {"up.model_rank_00_of_02", "up.model_rank_01_of_02", "bias"} <= set(reader.index.tensors["model"])


# - slices of unequal size ---------------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """Sixteen hidden features, cut as `sizes` says; a slice may be empty. `wrong`: one rank cuts along another
    dimension.
    """

    def __init__(self, sizes=(16,), rank=0, wrong=False, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        up, down = torch.randn(16, WIDTH) * 0.3, torch.randn(WIDTH, 16) * 0.3
        begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
        self.up, self.down = nn.Parameter(up[begin:end].clone()), nn.Parameter(down[:, begin:end].clone())
        for dim, parameter in enumerate((self.up, self.down)):
            parameter.tensor_model_parallel = len(sizes) > 1
            parameter.partition_dim = 1 - dim if wrong else dim - 2  # counted from the end

    def forward(self, x):
        return torch.tanh(x @ self.up.T) @ self.down.T


def uneven(rank, world, sizes, folder, loads):
    """Save, or load what others have saved; the slice that this rank has."""
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (world // len(sizes), len(sizes))))
    mpu = dsx_comm.Mpu(registry)
    model = Uneven(sizes, mpu.get_model_parallel_rank(), seed=8 if loads else 3)
    settings = {**config(3), "train_batch_size": 2 * (world // len(sizes)), "gradient_clipping": 0.0}
    engine = dsx.initialize(model=model, config=settings, mpu=mpu)[0]
    if loads:
        engine.load_checkpoint(folder)
    else:
        engine.backward(engine(batch(0, 0)[0]).square().sum())
        engine.step()
        engine.save_checkpoint(folder)
    held = [part for part in engine.optimizer.slices(held=True) if part.stop > part.start]
    moments = {part.name: (part.start, part.stop, part.states["exp_avg"].clone()) for part in held}
    return mpu.get_model_parallel_rank(), engine.module_state_dict(), moments


def test_slices_of_unequal_size_load_at_other_layouts(tmp_path):
    saved = run_ranks(uneven, 4, (11, 5), str(tmp_path), False)
    by_slice = {place: weights for place, weights, _ in saved}
    up = torch.cat([by_slice[0]["up"], by_slice[1]["up"]])
    down = torch.cat([by_slice[0]["down"], by_slice[1]["down"]], dim=1)
    reader = open_checkpoint(tmp_path)
    assert torch.equal(reader.whole("up"), up) and torch.equal(reader.whole("down"), down)
    for world, sizes in ((3, (3, 1, 12)), (2, (16, 0))):
        for place, weights, moments in run_ranks(uneven, world, sizes, str(tmp_path), True):
            begin, end = sum(sizes[:place]), sum(sizes[: place + 1])
            assert torch.equal(weights["up"], up[begin:end]) and torch.equal(weights["down"], down[:, begin:end])
            whole = reader.stored("optimizer", "exp_avg/up")[begin:end].reshape(-1)
            if "up" in moments:
                start, stop, value = moments["up"]
                assert torch.equal(value, whole[start:stop]) and value.any()
    engine = dsx.initialize(model=Uneven(), config={**config(0), "gradient_accumulation_steps": 2})[0]
    engine.load_checkpoint(str(tmp_path))
    assert torch.equal(engine.module.up.detach(), up)


def cut_in_two_ways(rank, world):
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (1, 2)))
    mpu = dsx_comm.Mpu(registry)
    with pytest.raises(ValueError, match=r"up: the slices have \(shape, partition_dim\).*parameter_places") as caught:
        dsx.initialize(
            model=Uneven((8, 8), rank, wrong=rank == 1), config={**config(0), "train_batch_size": 2}, mpu=mpu
        )
    return str(caught.value)


def test_slices_that_contradict_each_other_are_named_on_all_ranks():
    first, second = run_ranks(cut_in_two_ways, 2)
    assert first == second


# - experts by marks alone ---------------------------------------------------------------------------------------------


class Own(nn.Module):
    """`own` lives on half of the ranks only."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(5)
        self.dense = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(seed)
        self.own = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        for parameter in self.own.parameters():
            parameter.allreduce, parameter.group_name = False, "ep_size_2"

    def forward(self, x):
        return x + self.own(torch.tanh(self.dense(x)))


def experts(rank, world, stage, folder):
    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    settings = {**config(stage), "train_batch_size": 8}

    def build(seed):
        return dsx.initialize(model=Own(seed), config=settings)[0]

    def state(engine):
        return {name: value.clone() for name, value in engine.module_state_dict().items()}

    engine = build(seed=rank % 2)
    train(engine, rank)
    engine.save_checkpoint(folder)
    saved = state(engine)
    train(engine, rank, STEPS)
    expected = state(engine)
    again = build(seed=9)
    again.load_checkpoint(folder)
    loaded = state(again)
    train(again, rank, STEPS)
    got = state(again)
    means = ("own.1.running_mean", "own.1.running_var")  # each rank has its own; the checkpoint keeps one
    same = [
        all(torch.equal(a[name], b[name]) for name in a if name not in means)
        for a, b in ((saved, loaded), (expected, got))
    ]
    return same, loaded["own.1.running_mean"], saved["own.0.weight"]


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_by_marks_are_saved_by_those_who_hold_them(stage, tmp_path):
    found = run_ranks(experts, 4, stage, str(tmp_path))
    assert [same for same, *_ in found] == [[True, True]] * 4
    assert torch.equal(found[0][1], found[2][1]) and not torch.equal(found[0][1], found[1][1])
    stored = open_checkpoint(tmp_path)
    for rank, (_, _, weight) in enumerate(found):
        torch.testing.assert_close(stored.whole(f"own.0.weight.expert_rank_{rank % 2:02d}_of_02"), weight)


# - what modules tell --------------------------------------------------------------------------------------------------


class Told(nn.Module):
    def __init__(self, offset=4, name="weight"):
        super().__init__()
        self.weight, self.offset, self.name = nn.Parameter(torch.zeros(4, 2)), offset, name

    def parameter_places(self):
        return {self.name: ("whole_weight", (8, 2), (self.offset, 0))}


def test_modules_tell_where_their_parameters_belong():
    from dsx.engine.places import places_of_model

    sets = dsx_comm.RankSets.current()
    place = places_of_model(nn.Sequential(Told()), sets, known={})["0.weight"]
    assert (place.name, place.shape, place.box.offset, place.box.size) == ("0.whole_weight", (8, 2), (4, 0), (4, 2))
    for wrong in (Told(offset=6), Told(name="bias")):
        with pytest.raises(ValueError, match="parameter_places"):
            places_of_model(nn.Sequential(wrong), sets, known={})
    assert places_of_model(nn.Sequential(nn.Linear(2, 2)), sets, known={}) == {}
