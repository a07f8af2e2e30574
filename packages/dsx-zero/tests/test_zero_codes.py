"""Frozen weights in 4 and 8 bits (QLoRA): divided, kept and gathered as codes, at every stage, beside one process.

`FourBits` is such a weight as torchao has them; torchao's own and those of bitsandbytes run where they are installed.
"""

from __future__ import annotations

import copy
import pickle

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

SIZE, BLOCK = 128, 64
TABLE = torch.linspace(-1, 1, 16)
WHOLE = {"stage3_param_persistence_threshold": 0}


class FourBits(torch.Tensor):
    """A bfloat16 weight: two codes in a byte, and a bfloat16 scale for each 64 elements. The scales lie in memory with
    their dimensions exchanged, as some kernels want it.
    """

    @staticmethod
    def __new__(cls, codes, scale, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=codes.device)

    def __init__(self, codes, scale, shape):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight):
        blocks = weight.detach().float().reshape(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).to(torch.bfloat16)
        codes = (blocks / scale.float() * 7.5 + 7.5).round().clamp(0, 15).to(torch.uint8).reshape(-1, 2)
        scale = scale.reshape(weight.shape[0], -1).t().contiguous().t()
        return cls(codes[:, 0] * 16 + codes[:, 1], scale, weight.shape)

    def values(self):
        codes = torch.stack([self.codes // 16, self.codes % 16], 1).reshape(-1, BLOCK)
        return (TABLE[codes.long()] * self.scale.reshape(-1, 1).float()).reshape(self.shape)

    def __tensor_flatten__(self):
        return ["codes", "scale"], tuple(self.shape)

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return FourBits(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.name() == "aten::detach":
            return cls(args[0].codes, args[0].scale, args[0].shape)
        plain = [a.values() if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Multiply(torch.autograd.Function):
    """It keeps the codes for backward, as bitsandbytes does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        assert isinstance(weight, FourBits), type(weight)
        return x @ weight.values().t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.values(), None


class Coded(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.weight = nn.Parameter(FourBits.of(dense), requires_grad=False)
        self.scale_of_output = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return Multiply.apply(x, self.weight) * self.scale_of_output


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Parameter(torch.randn(rank, SIZE) / 8), nn.Parameter(torch.randn(SIZE, rank) / 8)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


class Net(nn.Module):
    def __init__(self, kind=lambda layer: Coded(layer.weight), layers=3, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapted(kind(nn.Linear(SIZE, SIZE, bias=False))) for _ in range(layers))
        if tied:
            self.layers[-1].base.weight = self.layers[0].base.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and name.split(".")[-1] != "weight")

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(step, rank=0, world=1):
    rows = torch.randn(12, SIZE, generator=torch.Generator().manual_seed(step))
    return rows[rank * 12 // world : (rank + 1) * 12 // world]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def trains_as_one_process(rank, world, stage, kind, config):
    build = KINDS[kind]
    plain = build()
    reference = adamw([p for p in plain.parameters() if p.requires_grad])
    model, optimizer = dsx_zero.shard(build(), adamw, config={"stage": stage, **config})
    for step in range(4):
        expected = plain(batch(step))
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
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    assert {p.dtype for n, p in model.named_parameters() if not p.requires_grad} & {torch.uint8, torch.int8}
    of = plain.layers[0].base
    whole = model.layers[0].base.weight.full_tensor()
    assert type(whole) is type(of.weight) and whole.shape == of.weight.shape
    if isinstance(whole, FourBits):
        assert torch.equal(whole.codes, of.weight.codes) and torch.equal(whole.scale, of.weight.scale)
        assert whole.scale.stride() == of.weight.scale.stride()


def of_torchao():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = Net(lambda layer: layer)
    quantize_(net, Int8WeightOnlyConfig())
    return net


def of_bitsandbytes(kind, **options):
    def make(layer):
        import bitsandbytes

        made = getattr(bitsandbytes.nn, kind)(SIZE, SIZE, bias=False, **options)
        made.load_state_dict({"weight": layer.weight.detach()})
        return made.to("cpu")

    return Net(make)


FOUR = {"quant_type": "nf4", "compute_dtype": torch.float32}
KINDS = {
    "4 bits": Net,
    "4 bits, tied": lambda: Net(tied=True),
    "torchao int8": of_torchao,
    "bitsandbytes NF4": lambda: of_bitsandbytes("Linear4bit", compress_statistics=False, **FOUR),
    "bitsandbytes NF4 twice": lambda: of_bitsandbytes("Linear4bit", compress_statistics=True, **FOUR),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_codes_train_as_in_one_process(kind, stage):
    if " " in kind and not kind.startswith("4"):
        pytest.importorskip(kind.split()[0], reason=f"{kind.split()[0]} is not installed")
    for config in (WHOLE, {}) if kind == "4 bits" and stage == 3 else (WHOLE,):
        run_ranks(trains_as_one_process, 2, stage, kind, config)


def test_codes_in_host_memory_and_on_three_ranks():
    run_ranks(trains_as_one_process, 3, 3, "4 bits", {**WHOLE, "offload_param": {"device": "cpu"}})


def gathered_bytes(rank, world):
    """A forward gathers each weight once: 4 bits and a 64th of 16 bits for each element."""
    model, optimizer = dsx_zero.shard(Net(), adamw, stage=3, config=WHOLE)
    for step in range(2):
        model(batch(step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with dsx_comm.count_traffic() as traffic, torch.no_grad():
        model(batch(0, rank, world))
    elements, trained = 3 * SIZE * SIZE, sum(p.numel() for p in model.parameters() if p.requires_grad)
    codes = elements // 2 + 2 * elements // BLOCK
    gathers = optimizer.runtime.units[0].groups[0].ranks.gather_group  # words of the order have a group of their own
    assert traffic.sent_bytes(group=gathers) == (codes + 4 * trained) * (world - 1) / world, traffic.by_op()
    assert codes / (2 * elements) == pytest.approx(0.27, abs=0.005)  # of the same weights in bfloat16
    kept = sum(p.local_shard.nbytes for p in model.parameters() if not p.requires_grad)
    assert kept == codes / world


def test_bytes_of_a_gather_are_those_of_the_codes():
    run_ranks(gathered_bytes, 2)


def state_dicts(rank, world, stage):
    model, optimizer = dsx_zero.shard(Net(), adamw, stage=stage, config=WHOLE)
    other = Net()
    for layer in other.layers:
        layer.base.weight = nn.Parameter(FourBits.of(torch.randn(SIZE, SIZE)), requires_grad=False)
    model.load_state_dict(other.state_dict())  # of a plain model
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0)), other(batch(0)))
    whole = dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]
    assert whole["layers.0.base.weight_codes"].dtype == torch.uint8 and "layers.0.base.weight" not in whole
    again, _ = dsx_zero.shard(Net(), adamw, stage=stage, config=WHOLE)
    again.load_state_dict(whole)
    with torch.no_grad():
        assert torch.equal(again(batch(0)), model(batch(0)))
    with pytest.raises((RuntimeError, dsx_zero.ZeroStateError), match=r"base\.weight: got a Tensor, expected a FourBi"):
        model.load_state_dict({**other.state_dict(), "layers.0.base.weight": torch.zeros(SIZE, SIZE)})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_dicts_of_weights_and_of_codes_load(stage):
    run_ranks(state_dicts, 2, stage)


def between_forwards(rank, world, stage):
    model, optimizer = dsx_zero.shard(Net(), adamw, stage=stage, config=WHOLE, device=torch.device("cpu", 0))
    weight = model.layers[1].base.weight
    assert isinstance(weight, torch.Tensor) and weight.shape == (SIZE, SIZE) and weight.dtype == torch.bfloat16
    assert weight.device == torch.device("cpu", 0)  # that of shard
    assert not weight.requires_grad and weight.grad is None and weight.numel() == SIZE * SIZE
    for action in (weight.zero_, lambda: weight.data.mul_(2), lambda: weight.requires_grad_(True)):
        with pytest.raises(Exception, match=r"weight_codes|frozen weight in the codes"):
            action()
    if stage < 3:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model.layers[0].base.weight_codes.zero_()
            assert torch.equal(twin(batch(0)), Net()(batch(0))) and not torch.equal(twin(batch(0)), model(batch(0)))
    hook = next(iter(model.layers[1].base._forward_hooks.values()))
    for part, why in ((weight, "weight_codes"), (hook, "the inner tensors of its weights cannot be pickled")):
        with pytest.raises(dsx_zero.ZeroStateError, match=why):
            pickle.dumps(part)
    model, optimizer = dsx_zero.shard(model, adamw, stage=3 - stage if stage != 2 else 3, config=WHOLE)  # again
    model(batch(0)).backward()
    optimizer.step()
    assert model.layers[1].base.weight is weight


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_weight_between_forwards(stage):
    run_ranks(between_forwards, 2, stage)


class Elsewhere(nn.Module):
    """A weight that another module uses, without a forward of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.holder = nn.ModuleList([nn.Linear(SIZE, SIZE, bias=False)])
        self.holder[0].weight = nn.Parameter(FourBits.of(torch.randn(SIZE, SIZE)), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return nn.functional.linear(x * self.gain, self.holder[0].weight).square().mean()


def used_elsewhere(rank, world, stage):
    plain = Elsewhere()
    model, optimizer = dsx_zero.shard(Elsewhere(), adamw, stage=stage, config=WHOLE)
    for step in range(2):
        loss, expected = model(batch(step)), plain(batch(step))
        torch.testing.assert_close(loss, expected)
        loss.backward()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_that_another_module_uses(stage):
    run_ranks(used_elsewhere, 2, stage)


class Traced(FourBits):
    """Codes whose arithmetic torch can trace."""

    def values(self):
        codes = torch.stack([self.codes // 16, self.codes % 16], 1).reshape(-1, BLOCK)
        return ((codes.float() / 7.5 - 1) * self.scale.reshape(-1, 1).float()).reshape(self.shape)

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Traced(inner["codes"], inner["scale"], context)


class Read(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.weight = nn.Parameter(Traced.of(dense), requires_grad=False)
        self.scale_of_output = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return nn.functional.linear(x, self.weight) * self.scale_of_output


def compiled(rank, world, stage):
    """Each block is a full graph, to which hooks outside of it give the weights; nothing is compiled again."""
    from torch._dynamo.utils import counters

    def made():
        return Net(lambda layer: Read(layer.weight))

    plain = made()
    model, optimizer = dsx_zero.shard(made(), adamw, stage=stage, config=WHOLE)
    counters.clear()
    dsx_zero.compile_units(model, backend="aot_eager", fullgraph=True)
    for step in range(3):
        loss = model(batch(step))
        loss.backward()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.detach(), plain(batch(step)).detach())
        if step == 1:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs <= 3 and not counters["graph_break"]
    if stage < 3:
        with torch.no_grad():
            x = torch.randn(2, SIZE)  # a module in a block, by itself
            torch.testing.assert_close(model.layers[0].base(x), plain.layers[0].base(x))


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks_are_full_graphs_with_the_weights(stage):
    run_ranks(compiled, 2, stage)


def refused(rank, world):
    def named(model):
        return [(name, type(p)) for name, p in model.named_parameters()]

    trained = Net()
    trained.layers[1].base.weight.requires_grad_(True)
    taken = Net()
    taken.layers[1].base.weight_codes = "mine"
    for model, why in ((trained, r"layers\.1\.base\.weight: is a FourBits that is trained"), (taken, "weight_codes")):
        before = named(model)
        with pytest.raises(dsx_zero.ZeroModelError, match=why):
            dsx_zero.shard(model, adamw, stage=3)
        assert named(model) == before

    model = Net()
    before = named(model)
    stranger = nn.Parameter(torch.ones(2))
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="is not a parameter of the model"):
        dsx_zero.shard(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1), stage=3)
    assert named(model) == before and isinstance(model.layers[0].base.weight, FourBits)
    dsx_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)  # of all parameters


def test_what_is_refused_changes_nothing():
    run_ranks(refused, 2)


def test_bitsandbytes_int8_is_refused():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    with pytest.raises(dsx_zero.ZeroModelError, match="is an Int8Params of bitsandbytes"):
        dsx_zero.shard(of_bitsandbytes("Linear8bitLt", has_fp16_weights=False), adamw, stage=3)
