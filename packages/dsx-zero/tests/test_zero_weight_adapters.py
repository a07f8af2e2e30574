"""LoRA in `weight_buckets`: merged as peft merges, or apart. The layers are stand-ins with the attributes of peft's."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.allocated import count_allocations, most_allocated
from torch import nn

WIDTH = 16


class LoraLinear(nn.Module):
    """Has what peft's `lora.Linear` has, as far as its weights go."""

    def __init__(self, base, names=("default",), rank=3, transposed=False):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False) for name in names})
        self.scaling = {name: 0.5 + number for number, name in enumerate(names)}
        self.fan_in_fan_out = transposed
        self.active_adapters, self.merged_adapters, self.disable_adapters = list(names), [], False
        self.lora_variant, self.lora_bias = {}, {}

    def change(self, name):
        up, down = self.lora_B[name].weight, self.lora_A[name].weight
        dtype = up.dtype
        if dtype == torch.bfloat16:  # on a CPU
            up, down = up.float(), down.float()
        found = up @ down
        return ((found.T if self.fan_in_fan_out else found) * self.scaling[name]).to(dtype)

    def forward(self, x):
        return self.base_layer(x) + sum(
            self.lora_B[n](self.lora_A[n](x)) * self.scaling[n] for n in self.active_adapters
        )


class Saved(nn.Module):
    """Has what peft's `ModulesToSaveWrapper` has."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(WIDTH, WIDTH)})
        self.active_adapters = ["default"]

    def forward(self, x):
        return self.modules_to_save["default"](x)


class Base(nn.Module):
    def __init__(self, dtype, names=("default",), transposed=False):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(LoraLinear(nn.Linear(WIDTH, WIDTH), names, transposed=transposed) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Saved(nn.Linear(WIDTH, WIDTH))
        self.to(dtype)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name or "modules_to_save" in name)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x)).float().square().mean()


class Peft(nn.Module):
    """Puts the model behind the prefix "base_model.model."."""

    def __init__(self, dtype, **options):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Base(dtype, **options)

    def forward(self, x):
        return self.base_model.model(x)


def built(rank, stage, dtype, model=None, **options):
    model, optimizer = dsx_zero.shard(
        model or Peft(dtype, **options),
        lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=1e-2),
        config={"stage": stage, "stage3_param_persistence_threshold": 20},
    )
    model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def streamed(optimizer, **options):
    found = {}
    for bucket in dsx_zero.export.weight_buckets(optimizer, **options):
        found |= {name: value.clone() for name, value in bucket.items()}
    return found


def merged(rank, world, stage, dtype, names, transposed, asleep):
    _, optimizer = built(rank, stage, dtype, names=names, transposed=transposed)
    plain = Peft(dtype, names=names, transposed=transposed)
    plain.load_state_dict(dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"])
    base, want = plain.base_model.model, {}
    with torch.no_grad():
        for number, layer in enumerate(base.layers):
            weight = layer.base_layer.weight.clone()
            for name in names:
                weight += layer.change(name)
            want |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": layer.base_layer.bias}
    saved = base.head.modules_to_save["default"]
    want |= {"norm.weight": base.norm.weight, "norm.bias": base.norm.bias}
    want |= {"head.weight": saved.weight, "head.bias": saved.bias}
    if asleep:
        optimizer.offload_states()
    for size in (1, 1500, 1 << 20):
        found = streamed(optimizer, bucket_bytes=size)
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(found[name], value), name
    apart = streamed(optimizer, lora="apart")
    adapters = {name for name in plain.state_dict() if "lora_" in name}
    assert apart.keys() == want.keys() | adapters
    assert torch.equal(apart["layers.0.weight"], base.layers[0].base_layer.weight)
    codes = streamed(optimizer, quantised="int8")
    error = codes["layers.0.weight"].float() * codes["layers.0.weight_scale"] - want["layers.0.weight"].float()
    assert bool((error.abs() <= codes["layers.0.weight_scale"] * 0.501).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("stage", "world", "names", "transposed", "asleep"),
    [
        (0, 1, ("default",), False, False),
        (2, 2, ("default",), True, True),
        (3, 2, ("one", "two"), False, False),
        (3, 3, ("default",), False, True),
    ],
)
def test_merged_weights_have_the_bits_of_peft_under_plain_names(stage, world, names, transposed, asleep, dtype):
    if names == ("one", "two"):
        names = ("default", "two")
    run_ranks(merged, world, stage, dtype, names, transposed, asleep)


def already(rank, world):
    """Adapters that the user has merged, or switched off, are not added again."""
    model, optimizer = built(rank, 2, torch.float32)
    first, second = model.base_model.model.layers
    first.merged_adapters.append("default")
    second.disable_adapters = True
    found = streamed(optimizer)
    for number, layer in enumerate((first, second)):
        assert torch.equal(found[f"layers.{number}.weight"], layer.base_layer.weight)


def test_adapters_that_are_merged_or_off_are_not_added():
    run_ranks(already, 1)


def refused(rank, world):
    for spoil, text in (
        (lambda layer: layer.lora_variant.update(default=nn.Identity()), r"it is a variant \(Identity\)"),
        (lambda layer: layer.lora_bias.update(default=True), "its lora_B has a bias"),
        (lambda layer: layer.active_adapters.append("of an embedding"), "its adapter is of an embedding"),
    ):
        model, optimizer = built(rank, 3, torch.float32)
        layer = model.base_model.model.layers[1]
        layer.scaling["of an embedding"] = 1.0
        spoil(layer)
        with pytest.raises(dsx_zero.ZeroConfigError, match=rf"layers.1: the adapter '.*{text}.*lora='apart'"):
            dsx_zero.export.weight_buckets(optimizer)
        streamed(optimizer, lora="apart")


def test_adapters_with_another_formula_are_refused_by_name():
    run_ranks(refused, 1)


# - Memory -------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self, lora, dtype):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(256, 256) for _ in range(16)]
        self.layers = nn.ModuleList(LoraLinear(layer) if lora else layer for layer in layers)
        self.to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def counted(rank, world, lora, dtype, to, quantised, asleep):
    _, optimizer = dsx_zero.shard(
        Wide(lora, dtype), torch.optim.SGD, config={"stage": 3, "stage3_param_persistence_threshold": 0}
    )
    if asleep:
        optimizer.offload_states()
    bucket, options = 1 << 20, {"dtype": to, "quantised": quantised}
    for _ in dsx_zero.export.weight_buckets(optimizer, bucket_bytes=bucket, **options):
        pass  # what is made once
    count_allocations()
    with most_allocated() as seen:
        largest = 0
        for found in dsx_zero.export.weight_buckets(optimizer, bucket_bytes=bucket, **options):
            largest = max(largest, sum(value.nbytes for value in found.values()))
    return seen.most - seen.first, largest


@pytest.mark.parametrize(
    ("lora", "dtype", "to", "quantised", "asleep"),
    [
        (False, torch.float32, None, None, False),
        (False, torch.float32, torch.bfloat16, None, True),
        (True, torch.float32, None, None, False),
        (True, torch.bfloat16, torch.float32, None, False),
        (False, torch.float32, torch.bfloat16, "int8", False),
    ],
)
def test_a_push_needs_one_bucket_beside_the_model(lora, dtype, to, quantised, asleep):
    for extra, largest in run_ranks(counted, 2, lora, dtype, to, quantised, asleep):
        assert 1 << 18 < extra <= (1 << 20) + (1 << 16)  # 64 KiB: words of the agreement, and views
        assert largest <= 1 << 20
