"""Where torch's distributed tensors, checkpoints and compiler meet a sharded model: a row of the page's table each."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.torch_calls import Net, Row, Training, misdocumented, outcomes, unexpected
from torch import nn

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "interoperation.md"
ADAMW = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)}


def folder(t):
    """A new folder, the same on all ranks."""
    import torch.distributed as dist

    found = [tempfile.mkdtemp()]
    if t.sharded and t.world > 1:
        dist.broadcast_object_list(found)
    return found[0]


def alone(t):
    """The plain model of a rank saves and loads by itself."""
    return {} if t.sharded else {"no_dist": True}


def states(t, **options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(t.model, t.optimizer, options=StateDictOptions(**options))


def put(t, weights, found, **options):
    from torch.distributed.checkpoint import state_dict as by_torch

    kind = by_torch.StateDictOptions(**options)
    by_torch.set_model_state_dict(t.model, weights, options=kind)
    by_torch.set_optimizer_state_dict(t.model, t.optimizer, found, options=kind)


def rolled_back(**options):
    """Steps, a copy of the state, more steps, back to the copy."""

    def run(t: Training) -> None:
        t.train(2)
        kept = copy.deepcopy(states(t, **options))
        t.train(2, first=60)
        put(t, *kept, **options)
        t.train(1, first=70)

    return run


def weights_only(t):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    t.train(1)
    kept = copy.deepcopy(get_model_state_dict(t.model))
    t.train(1, first=60)
    set_model_state_dict(t.model, kept)
    t.train(1, first=70)


def saved(t):
    import torch.distributed.checkpoint as dcp

    t.train(2)
    path = folder(t)
    weights, found = states(t)
    dcp.save({"model": weights, "optimizer": found}, checkpoint_id=path, **alone(t))
    t.train(2, first=60)
    weights, found = states(t)
    state = {"model": weights, "optimizer": found}
    dcp.load(state, checkpoint_id=path, **alone(t))
    put(t, state["model"], state["optimizer"])
    t.train(1, first=70)


def saved_objects(t):
    import torch.distributed.checkpoint as dcp

    t.train(2)
    path = folder(t)
    dcp.save({"model": t.model, "optimizer": t.optimizer}, checkpoint_id=path, **alone(t))
    t.train(2, first=60)
    dcp.load({"model": t.model, "optimizer": t.optimizer}, checkpoint_id=path, **alone(t))
    t.train(1, first=70)


def saved_weights(t):
    """`model.state_dict()` itself, in place."""
    import torch.distributed.checkpoint as dcp

    t.train(1)
    path = folder(t)
    dcp.save({"model": t.model.state_dict()}, checkpoint_id=path, **alone(t))
    t.train(1, first=60)
    dcp.load({"model": t.model.state_dict()}, checkpoint_id=path, **alone(t))
    t.train(1, first=70)


def to_file(t):
    t.train(1)
    torch.save(t.model.state_dict(), io.BytesIO())


def full_to_file(t):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    t.train(1)
    whole = get_model_state_dict(t.model, options=StateDictOptions(full_state_dict=True))
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    plain = Net(7).to(t.dtype)
    plain.load_state_dict(torch.load(file))  # what leaves is an ordinary model
    t.model.load_state_dict(plain.state_dict())
    t.train(1, first=60)


def averaged(t):
    if not t.sharded:
        t.train(3)
        return
    copied = t.optimizer.copy_of()
    t.train(1)
    copied.update(0.9)
    with torch.no_grad(), copied.applied():
        t.loss(50)
    t.train(2, first=51)


def blocks_compiled(t):
    import dsx_zero

    if t.sharded:
        dsx_zero.compile_units(t.model, backend="aot_eager", fullgraph=True)
    t.train(3)


def mesh(t):
    """A model over a device mesh of one dimension, and of two."""
    import dsx_zero
    from torch.distributed.device_mesh import init_device_mesh

    if not t.sharded:
        t.train(2)
        return
    for shape, names in (((2,), ("dp",)), ((1, 2), ("replicate", "shard"))):
        model, optimizer = dsx_zero.shard(
            Net(), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), stage=t.stage if len(shape) == 1 else 3,
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
        )  # fmt: skip
        for index in (50, 51):
            t.loss(index, model).backward()
            optimizer.step()
            optimizer.zero_grad()
    t.train(2)
    for mine, other in zip(model.parameters(), t.model.parameters()):
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in (mine, other)]
        torch.testing.assert_close(*whole)


def given(prepare):
    """A model that torch has prepared, given to `shard`."""

    def run(t: Training) -> None:
        import dsx_zero

        if t.sharded:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            prepare(model)
            dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=t.stage)

    return run


def tensor_parallel(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})


def tensor_parallel_trained(t):
    """The same steps with the whole batch, as a tensor-parallel model on all ranks."""
    import dsx_zero
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    t.train(2)
    if not t.sharded:
        return
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Net(), mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    model, optimizer = dsx_zero.shard(
        model, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), stage=t.stage, mesh=mesh["dp"],
        config={"stage3_param_persistence_threshold": 0},
    )  # fmt: skip
    whole = Training.__new__(Training)
    whole.__dict__.update(t.__dict__, sharded=False)  # the batches of all ranks
    for index in (50, 51):
        whole.loss(index, model).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]
    for name, value in t.weights().items():
        torch.testing.assert_close(state[name], value)
    optimizer.release()


def fully_sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


class OneByte(torch.Tensor):
    """A weight that FSDP2 would send in another form, and that is no tensor of several."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_subclass(cls, values)

    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError("never asked")

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        raise AssertionError("never asked")


def one_byte(model):
    model[0].weight = nn.Parameter(OneByte(model[0].weight.detach()))


class Negative(torch.Tensor):
    """A weight whose negative is sent."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values):
        self.values_ = values

    def __tensor_flatten__(self):
        return ["values_"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Negative(inner["values_"])

    def fsdp_pre_all_gather(self, mesh):
        return (-self.values_,), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        made = torch.neg(outputs[0], out=out)
        return None if out is not None else (made, (made,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.name() == "aten::detach":
            return cls(args[0].values_)
        return func(*(a.values_ if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def two_layers(make=None, second=None):
    torch.manual_seed(3)
    found = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    if make is not None:
        found[0].weight = nn.Parameter(make(found[0].weight.detach()))
    if second is not None:
        found[1].weight = nn.Parameter(second(), requires_grad=False)
    return found


class Codes(torch.Tensor):
    """A frozen weight in 8 bits, with the protocol of torchao's."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Codes(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.name() == "aten::detach":
            return cls(args[0].codes, args[0].scale)
        return func(*(a.codes * a.scale if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def like_plain(**of_sharded):
    """Training of two layers: the losses are those of the plain model."""

    def run(t):
        import dsx_zero

        t.train(1)
        if not t.sharded:
            return
        plain = two_layers(second=of_sharded.get("second"))
        other = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        model, optimizer = dsx_zero.shard(
            two_layers(**of_sharded),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            stage=t.stage,
            config={"stage3_param_persistence_threshold": 0},
        )
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            losses = [net(x).square().mean() for net in (plain, model)]
            torch.testing.assert_close(*losses)
            for loss, stepped in zip(losses, (other, optimizer)):
                loss.backward()
                stepped.step()
                stepped.zero_grad()
        optimizer.release()

    return run


def codes():
    return Codes(torch.randint(-127, 128, (8, 8)).to(torch.int8), torch.full((8, 1), 0.01))


def deep_copy(t):
    t.train(1)
    copy.deepcopy(t.model)
    t.train(1, first=60)


PARTITIONED = {3: "is partitioned over the ranks"}
ROWS = [
    Row("`get_model_state_dict`, `set_model_state_dict`", weights_only),
    Row("`get_state_dict`, `set_...`: each rank's part", rolled_back(), **ADAMW),
    Row("`full_state_dict=True`", rolled_back(full_state_dict=True), **ADAMW),
    Row("states with shapes of their own (Adafactor, Dion, SOAP, 8-bit Adam)", rolled_back(full_state_dict=True),
        optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.05)),
    Row("`cpu_offload=True`", rolled_back(cpu_offload=True), **ADAMW),
    Row("`flatten_optimizer_state_dict=True`", rolled_back(flatten_optimizer_state_dict=True), **ADAMW),
    Row("`dcp.save`, `dcp.load` of what `get_state_dict` gives", saved, **ADAMW),
    Row("`dcp.save`, `dcp.load` of `{\"model\": model, \"optimizer\": optimizer}`", saved_objects, **ADAMW),
    Row("`dcp.save`, `dcp.load` of `{\"model\": model.state_dict()}`", saved_weights),
    Row("`torch.save(model.state_dict())`", to_file, PARTITIONED),
    Row("`torch.save` of `get_model_state_dict(full_state_dict=True)`, and back", full_to_file),
    Row("an EMA: `optimizer.copy_of()`", averaged),
    Row("`copy.deepcopy(model)`", deep_copy, {3: "optimizer.copy_of()"}),
    Row("`compile_units(model, fullgraph=True)`", blocks_compiled),
    Row("`shard(mesh=...)` of one or two dimensions", mesh),
    Row("`shard(mesh=...)` of a model of `parallelize_module` or `tp_plan`", tensor_parallel_trained),
    Row("the same without `mesh=`", given(tensor_parallel),
        dict.fromkeys(range(4), "hold different parts")),
    Row("a model of `fully_shard`, given to `shard`", given(fully_sharded),
        dict.fromkeys(range(4), "remove the lines")),
    Row("frozen weights in 8 or 4 bits (torchao, bitsandbytes' NF4)", like_plain(second=codes)),
    Row("trained weights with `fsdp_pre_all_gather` (torchao's float8)", like_plain(make=Negative)),
    Row("the same without `__tensor_flatten__`", given(one_byte),
        dict.fromkeys(range(4), "expected a subclass whose __tensor_flatten__ names one tensor")),
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_row(stage):
    assert not (wrong := unexpected(ROWS, stage, run_ranks(outcomes, 2, ROWS, stage, timeout=180))), "\n".join(wrong)


def test_the_page_says_what_is_tested():
    assert not (wrong := misdocumented(ROWS, PAGE.read_text(), "What works")), "\n".join(wrong)
    assert 3 * len({row.name for row in ROWS}) >= 24
