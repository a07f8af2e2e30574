"""Trained weights that are sent by FSDP2's `fsdp_pre_all_gather` and `fsdp_post_all_gather`, beside one process.

`OneScale` is such a weight as torchao's float8 weights are; torchao's own run where it is installed.
"""

from __future__ import annotations

import copy

import dsx_comm
import dsx_zero
import pytest
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks
from torch import nn

SIZE, ROWS = 24, 48
WHOLE = {"stage3_param_persistence_threshold": 2 * SIZE}  # biases stay whole


def dispatched(cls, func, args, kwargs, inner):
    if func.name() == "aten::detach":
        return cls(*inner(args[0]))
    raise NotImplementedError(f"{func} of a {cls.__name__}")


class Codes(torch.Tensor):
    """Codes in 8 bits with one scale: what forwards see of a `OneScale` that was gathered."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, dtype):
        self.codes, self.scale, self.of = codes, scale, dtype

    def values(self):
        return (self.codes.double() * self.scale).to(self.of)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatched(cls, func, args, kwargs, lambda t: (t.codes, t.scale, t.of))


def coded(weight, largest):
    scale = largest.double() / 127
    return (weight.double() / scale).round().to(torch.int8), scale


class OneScale(torch.Tensor):
    """A weight that is sent in 8 bits, by the hook with one argument."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data):
        self._data = data

    def __tensor_flatten__(self):
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["_data"])

    def gathered(self):
        return Codes(*coded(self._data, self._data.abs().max()), self.dtype)

    def fsdp_pre_all_gather(self, mesh):
        largest = self._data.abs().max()
        if mesh is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        codes, scale = coded(self._data, largest)
        return (codes,), scale

    def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
        (codes,) = outputs
        if out is None:
            return Codes(codes, scale, param_dtype), (codes,)
        assert out.codes.data_ptr() == codes.data_ptr()
        out.scale = scale
        return None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatched(cls, func, args, kwargs, lambda t: (t._data,))


class RowScales(OneScale):
    """A weight that is sent in 8 bits with a scale for each row, by the hook with five arguments, and made an ordinary
    tensor again by its post-hook.
    """

    def gathered(self):
        codes, scale = coded(self._data, self._data.abs().amax(1, keepdim=True))
        return (codes.double() * scale).to(self.dtype)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert outer_stride == (outer_size[1], 1) and module.weight.shape == outer_size
        assert mp_policy.param_dtype == self.dtype
        return coded(self._data, self._data.abs().amax(1, keepdim=True)), None

    def fsdp_post_all_gather(self, outputs, kept, param_dtype, *, out=None):
        codes, scale = outputs
        if out is None:
            out = torch.empty(codes.shape, dtype=param_dtype)
            torch.mul(codes.double(), scale, out=out)
            return out, (out,)
        torch.mul(codes.double(), scale, out=out)
        return None


class Multiply(torch.autograd.Function):
    """It saves the weight as it is, in codes, and reads it again in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ values(weight).t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ values(weight), gradient.t() @ x


def values(weight):
    weight = weight.gathered() if isinstance(weight, OneScale) else weight
    return weight.values() if isinstance(weight, Codes) else weight


class Layer(nn.Linear):
    def forward(self, x):
        return Multiply.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down = Layer(SIZE, ROWS), Layer(ROWS, SIZE)
        for layer in (self.up, self.down):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, kind, dtype=torch.float32, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(kind) for _ in range(3))
        self.recompute = recompute
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    inner = getattr(parameter, "_data", parameter).detach().to(dtype)
                    module._parameters[name] = nn.Parameter(kind(inner) if name == "weight" else inner)

    def forward(self, x):
        for layer in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x.float().square().mean()


KINDS = {"one scale": OneScale, "row scales": RowScales}


def batch(step, rank=0, world=1, dtype=torch.float32):
    rows = torch.randn(12, SIZE, generator=torch.Generator().manual_seed(step)).to(dtype)
    return rows[rank * 12 // world : (rank + 1) * 12 // world]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def reference_of(kind):
    """One process: the inner tensors are the parameters, and forwards get the subclass around them."""
    plain = Net(kind)
    weights = {}
    for module in plain.modules():
        if isinstance(module, Layer):
            weights[module] = nn.Parameter(module.weight._data)
            del module._parameters["weight"]
    return plain, weights


class AsIs(torch.autograd.Function):
    """The subclass around a parameter."""

    @staticmethod
    def forward(ctx, weight, kind):
        return kind(weight.detach())

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def loss_of_reference(plain, weights, x):
    for module, weight in weights.items():
        module.weight = AsIs.apply(weight, plain.kind)
    return plain(x)


def trains_as_one_process(rank, world, stage, kind, config, recompute):
    plain, weights = reference_of(KINDS[kind])
    plain.kind = KINDS[kind]
    trained = [*weights.values(), *plain.parameters()]
    reference = adamw(trained)
    model, optimizer = dsx_zero.shard(
        Net(KINDS[kind], recompute=recompute), adamw, config={"stage": stage, **WHOLE, **config}
    )
    for step in range(4):
        expected = loss_of_reference(plain, weights, batch(step))
        expected.backward()
        reference.step()
        reference.zero_grad()
        loss = model(batch(step, rank, world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dsx_comm.all_reduce(mean, op=dsx_comm.ReduceOp.AVG)
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=0)
    found = dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]
    torch.testing.assert_close(found["layers.1.up.weight"], weights[plain.layers[1].up].detach(), rtol=1e-4, atol=1e-5)
    assert {type(p) for p in found.values()} == {torch.Tensor}


CASES = [
    (1, 3, "one scale", {}, False),
    (2, 0, "one scale", {}, False),
    (2, 2, "row scales", {}, False),
    (2, 3, "one scale", {}, True),
    (3, 3, "row scales", {}, False),
    (2, 3, "row scales", {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, True),
    (2, 3, "one scale", {"stage3_param_persistence_threshold": 10**6}, False),
]


@pytest.mark.parametrize(("world", "stage", "kind", "config", "recompute"), CASES)
def test_weights_with_gather_hooks_train_as_on_one_process(world, stage, kind, config, recompute):
    run_ranks(trains_as_one_process, world, stage, kind, config, recompute)


def gathered_bytes(rank, world):
    """Of weights in bfloat16 a forward gathers half, and scales where there are some for each row."""
    sent = {}
    for kind in (OneScale, RowScales):
        model, optimizer = dsx_zero.shard(Net(kind, torch.bfloat16), adamw, stage=3, config=WHOLE)
        for step in range(2):
            model(batch(step, rank, world, torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        groups = [group for unit in optimizer.runtime.units for group in unit.groups if group.key.hooked]
        assert len(groups) == 6 and not any(group.layout.gaps for group in groups)
        with dsx_comm.count_traffic() as traffic, torch.no_grad():
            model(batch(0, rank, world, torch.bfloat16))
        sent[kind] = traffic.sent_bytes(group=groups[0].ranks.gather_group)
    elements, rows = 3 * 2 * SIZE * ROWS, 3 * (SIZE + ROWS)
    assert sent[OneScale] == elements * (world - 1) / world == 0.5 * (2 * elements) * (world - 1) / world
    assert sent[RowScales] == (elements + 8 * rows) * (world - 1) / world  # scales in float64


def test_a_gather_has_half_the_bytes_of_bfloat16():
    run_ranks(gathered_bytes, 2)


def loss_of(model, x):
    with torch.no_grad():
        return model(x)


def between_forwards(rank, world, stage):
    """Values are read and written exactly, and forwards see each change."""
    model, optimizer = dsx_zero.shard(Net(OneScale), adamw, stage=stage, config=WHOLE)
    plain, weight = Net(OneScale), model.layers[1].up.weight
    assert weight.shape == (ROWS, SIZE) and weight.requires_grad and type(weight) is not OneScale
    first = plain.layers[1].up.weight._data
    assert torch.equal(dsx_zero.safe_get_full_fp32_param(weight), first)
    assert torch.equal(loss_of(model, batch(0)), loss_of(plain, batch(0)))

    with dsx_zero.GatheredParameters([weight], modifier_rank=0):
        with torch.no_grad():
            assert torch.equal(weight.clone(), first)
            weight.mul_(3 if rank == 0 else 5)
    first.mul_(3)
    assert torch.equal(loss_of(model, batch(0)), loss_of(plain, batch(0)))
    dsx_zero.safe_set_full_fp32_param(weight, torch.full((ROWS, SIZE), 0.25))
    first.fill_(0.25)
    assert torch.equal(loss_of(model, batch(0)), loss_of(plain, batch(0)))
    other = Net(OneScale)
    other.layers[1].up.weight._data.normal_(generator=torch.Generator().manual_seed(1))
    found = {name: p.detach() for name, p in other.named_parameters()}
    model.load_state_dict(found)  # subclasses
    assert torch.equal(loss_of(model, batch(0)), loss_of(other, batch(0)))

    loss = model(batch(0))
    loss.backward()
    stale = model(batch(1))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    optimizer.zero_grad()

    expected = loss_of(model, batch(0))
    if stage < 3:
        twin = copy.deepcopy(model)
        assert torch.equal(loss_of(twin, batch(0)), expected)
    model, optimizer = dsx_zero.shard(model, adamw, stage=0 if stage == 3 else 3, config=WHOLE)  # again
    assert torch.equal(loss_of(model, batch(0)), expected)
    model(batch(0)).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_between_forwards(stage):
    run_ranks(between_forwards, 2, stage)


class Tied(nn.Module):
    """One weight in two layers, which a third module also reads, and a frozen one."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([Layer(SIZE, SIZE), Layer(SIZE, SIZE), Layer(SIZE, SIZE)])
        shared = nn.Parameter(kind(torch.randn(SIZE, SIZE) / 5))
        self.layers[0].weight = self.layers[1].weight = shared
        self.layers[2].weight = nn.Parameter(kind(torch.randn(SIZE, SIZE) / 5), requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return Multiply.apply(x, self.layers[1].weight).square().mean()


def tied(rank, world, stage):
    plain, kind = Tied(lambda values: values), OneScale
    model, optimizer = dsx_zero.shard(Tied(kind), adamw, stage=stage, config=WHOLE)
    reference = adamw([p for p in plain.parameters() if p.requires_grad])
    for step in range(3):
        shown = {layer: layer.weight for layer in plain.layers}
        made = {p: AsIs.apply(p, kind) for p in dict.fromkeys(shown.values())}
        for layer, weight in shown.items():
            del layer._parameters["weight"]
            layer.weight = made[weight]
        expected = plain(batch(step))
        for layer, weight in shown.items():
            del layer.__dict__["weight"]
            layer.weight = weight
        loss = model(batch(step))
        for one, stepped in ((expected, reference), (loss, optimizer)):
            one.backward()
            stepped.step()
            stepped.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_weight_that_another_module_reads_and_a_frozen_one(stage):
    run_ranks(tied, 2, stage)


class TwoTensors(OneScale):
    """Codes are trained, by an optimizer that knows them."""

    def __tensor_flatten__(self):
        return ["_data", "_data"], None


class Half(OneScale):
    fsdp_post_all_gather = property()  # there is none


class Uneven(OneScale):
    def fsdp_pre_all_gather(self, mesh):
        return (torch.zeros(7),), None


def refused(rank, world):
    for kind, why in ((TwoTensors, "expected a subclass whose __tensor_flatten__"), (Half, "without fsdp_post_all_ga")):
        model = Net(kind)
        before = dict(model.named_parameters())
        with pytest.raises(dsx_zero.ZeroModelError, match=r"layers\.0\.up\.weight: is a .*" + why):
            dsx_zero.shard(model, adamw, stage=3)
        assert all(before[name] is p for name, p in model.named_parameters())
    model, _ = dsx_zero.shard(Net(Uneven), adamw, stage=3, config=WHOLE)
    with pytest.raises(dsx_zero.ZeroModelError, match=r"layers\.0\.down\.weight|layers\.0\.up\.weight"):
        model(batch(0))


def test_what_cannot_be_sent_is_refused_by_name():
    run_ranks(refused, 5)
