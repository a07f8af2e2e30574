"""What PyTorch users do with parameters and modules, on a sharded model as on a plain one: a row of the README's
table each.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.torch_calls import Net, Row, Training, misdocumented, outcomes, unexpected, worse
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

README = Path(__file__).resolve().parents[1] / "README.md"
PARTITIONED = "is partitioned over the ranks"
MEMORY = {stage: "has other memory now" for stage in range(3)}


def then_train(change):
    def run(t: Training) -> None:
        t.train(1)
        change(t)
        t.train()

    return run


def between_steps(change):
    def run(t: Training) -> None:
        for index in range(3):
            t.train(1, first=index)
            change(t)

    return run


@torch.no_grad()
def write(t):
    t.model.head.weight.mul_(0.5)
    t.model.head.bias.copy_(torch.arange(3.0))
    t.model.layers[0].weight[0].zero_()
    nn.init.constant_(t.model.layers[1].bias, 0.2)


def write_data(t):
    t.model.head.weight.data.mul_(0.5)
    t.model.layers[0].weight.data[0, 0] = 2.0


def decay(t):
    with torch.no_grad():
        for p in t.model.parameters():
            p.mul_(0.9)


def decay_data(t):
    for p in t.model.parameters():
        p.data.mul_(0.9)


def average_into(t):
    with torch.no_grad():
        for p in t.model.parameters():
            p.lerp_(torch.full(p.shape, 0.2, dtype=p.dtype), 0.1)


def foreach(t):
    with torch.no_grad():
        torch._foreach_mul_(list(t.model.parameters()), 0.5)


def initialise(t):
    torch.manual_seed(5)
    t.model.apply(lambda m: nn.init.normal_(m.weight, std=0.3) if isinstance(m, nn.Linear) else None)


def initialise_differently(t):
    torch.manual_seed(5 + (t.rank if t.sharded else 0))
    for p in t.model.parameters():
        nn.init.normal_(p)


def give_data(t):
    for p in t.model.parameters():
        p.data = torch.full(p.shape, 0.1, dtype=p.dtype)


def transpose(t):
    weight = t.model.layers[1].weight
    with torch.no_grad():
        weight.data = weight.data.t()


def from_vector(t):
    nn.utils.vector_to_parameters(torch.linspace(-0.5, 0.5, 155, dtype=t.dtype), t.model.parameters())


def to_vector(t):
    assert nn.utils.parameters_to_vector(t.model.parameters()).shape == (155,)


def load(t):
    t.model.load_state_dict(Net(7).to(t.dtype).state_dict())


def load_assigning(t):
    t.model.load_state_dict(Net(7).to(t.dtype).state_dict(), assign=True)


def save_and_load(t):
    kept = {name: value.clone() for name, value in t.model.state_dict().items()}
    t.train(1)
    t.model.load_state_dict(kept)


def save_to_file(t):
    file = io.BytesIO()
    torch.save(t.model.state_dict(), file)
    file.seek(0)
    assert torch.load(file)["head.bias"].shape == (3,)


def there_and_back(t):
    t.model.half()
    t.model.to(t.dtype)


def to_what_it_is(t):
    t.loss(0).backward()
    t.model.to("cpu").to(t.dtype)
    t.step()


def freeze(t):
    t.model.head.requires_grad_(False)
    t.train()
    t.model.head.bias.requires_grad = True


def count(t):
    assert sum(p.numel() for p in t.model.parameters()) == 155
    assert [(n, tuple(p.shape)) for n, p in t.model.named_parameters()] == [
        (n, tuple(p.shape)) for n, p in Net().named_parameters()
    ]
    t.model.eval()
    with torch.no_grad():
        t.loss(0)
    t.model.train()


def set_to_itself(t):
    t.model.layers[1].weight = t.model.layers[1].weight


def replace_layer(t):
    t.model.layers[1] = nn.Linear(8, 8).to(t.dtype)


def replace_parameter(t):
    t.model.head.bias = nn.Parameter(torch.zeros(3, dtype=t.dtype))


def tie(t):
    t.model.layers[1].bias = t.model.layers[0].bias


def add_parameter(t):
    t.model.extra = nn.Parameter(torch.zeros(3))


def append_layer(t):
    t.model.layers.append(nn.Linear(8, 8).to(t.dtype))


def delete_layer(t):
    del t.model.layers[1]


def wrap_layer(t):
    t.model.layers[1] = nn.Sequential(t.model.layers[1])


def change_what_has_no_parameters(t):
    t.model.drop = nn.Dropout(0.0)
    t.train(1)
    t.model.drop = nn.Identity()


def copy_and_train_both(t):
    other = copy.deepcopy(t.model)
    t.train(1)
    own = torch.optim.SGD(other.parameters(), lr=1.0)
    before = other.head.weight.detach().clone()
    t.loss(0, other).backward()
    own.step()
    assert not torch.equal(before, other.head.weight)


def save_whole_model(t):
    file = io.BytesIO()
    torch.save(t.model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(t.loss(0, other), t.loss(0))
    t.loss(0, other).backward()


def average(t):
    averaged = AveragedModel(t.model)
    for index in range(2):
        t.train(1, first=index)
        averaged.update_parameters(t.model)
    t.model.load_state_dict(averaged.module.state_dict())


def compiled(t):
    model = torch.compile(t.model, backend="eager")
    for index in range(2):
        t.loss(index, model).backward()
        t.step()


def functional(t):
    for index in range(2):
        x, y = t.batch(index)
        output = functional_call(t.model, dict(t.model.named_parameters()), (x,))
        nn.functional.mse_loss(output.float(), y).backward()
        t.step()


def functional_with_others(t):
    other, (x, _) = Net(9).to(t.dtype), t.batch(0)
    assert torch.equal(functional_call(t.model, dict(other.named_parameters()), (x,)), other(x))


def data_parallel(t):
    model = nn.parallel.DistributedDataParallel(t.model) if t.sharded else t.model
    t.loss(0, model).backward()


def fully_sharded(t):
    from torch.distributed.fsdp import fully_shard

    if t.sharded:
        fully_shard(t.model)


OTHERS = "'layers.1.weight' was replaced by another parameter"
ROWS = [
    Row("in-place writes under `torch.no_grad()`: `p.mul_`, `p.copy_`, `p[0] = x`, `nn.init.*`", between_steps(write)),
    Row("`p.data.mul_(c)`, `p.data[...] = x`", between_steps(write_data)),
    Row("loops over `model.parameters()`: weight decay, EMA into the model, noise", between_steps(decay)),
    Row("loops over `model.parameters()`: weight decay, EMA into the model, noise", between_steps(decay_data),
        variant="data"),
    Row("loops over `model.parameters()`: weight decay, EMA into the model, noise", between_steps(average_into),
        variant="EMA"),
    Row("`torch._foreach_mul_(parameters, c)`", then_train(foreach), {3: PARTITIONED}),
    Row("`model.apply(init)`", then_train(initialise)),
    Row("writes that differ between the ranks", then_train(initialise_differently),
        {s: "not alike on all ranks" for s in range(3)}),
    Row("`p.data = x`", then_train(give_data), MEMORY),
    Row("`p.data = x`", then_train(transpose), MEMORY, variant="transpose"),
    Row("`vector_to_parameters`", then_train(from_vector), {**MEMORY, 3: PARTITIONED}),
    Row("`parameters_to_vector`", then_train(to_vector), {3: PARTITIONED}),
    Row("`model.load_state_dict(whole)`", then_train(load)),
    Row("`model.load_state_dict(..., assign=True)`", then_train(load_assigning), "was replaced by another parameter"),
    Row("`model.state_dict()`", then_train(save_and_load), {3: PARTITIONED}),
    Row("`model.state_dict()`", then_train(save_to_file), {3: PARTITIONED}, variant="saved"),
    Row("`model.double()`, `half()`, `to(other device)`", then_train(there_and_back), {**MEMORY, 3: PARTITIONED}),
    Row("`model.to(what it is)`", then_train(to_what_it_is)),
    Row("`requires_grad_(False)` and back", then_train(freeze)),
    Row("`model.train()`, `eval()`, counts and names of parameters", then_train(count)),
    Row("a parameter set to itself", then_train(set_to_itself)),
    Row("a layer or parameter replaced, added, removed, wrapped or tied", then_train(replace_layer), OTHERS),
    Row("a layer or parameter replaced, added, removed, wrapped or tied", then_train(replace_parameter),
        "'head.bias' was replaced", variant="parameter"),
    Row("a layer or parameter replaced, added, removed, wrapped or tied", then_train(tie),
        "'layers.1.bias' was replaced", variant="tied"),
    Row("a layer or parameter replaced, added, removed, wrapped or tied", then_train(add_parameter),
        "'extra' was added", variant="added"),
    Row("a layer or parameter replaced, added, removed, wrapped or tied", then_train(append_layer),
        "'layers.2.weight' was added", variant="appended"),
    Row("a layer or parameter replaced, added, removed, wrapped or tied", then_train(delete_layer),
        "'layers.1.weight' is not there any more", variant="removed"),
    Row("a layer or parameter replaced, added, removed, wrapped or tied", then_train(wrap_layer),
        "'layers.1.0.weight' was added", variant="wrapped"),
    Row("a module without parameters added or exchanged", then_train(change_what_has_no_parameters)),
    Row("parametrizations (`weight_norm`), pruning", then_train(lambda t: parametrizations.weight_norm(t.model.head)),
        {**{s: "'head.weight' is not there any more" for s in range(3)}, 3: PARTITIONED}),
    Row("parametrizations (`weight_norm`), pruning",
        then_train(lambda t: prune.l1_unstructured(t.model.head, "weight", 0.5)),
        {**{s: "'head.weight_orig' was added" for s in range(3)}, 3: PARTITIONED}, variant="pruning"),
    Row("`copy.deepcopy(model)`", then_train(copy_and_train_both), {3: PARTITIONED}),
    Row("`torch.save(model)`, `pickle`", then_train(save_whole_model), {3: PARTITIONED}),
    Row("`AveragedModel(model)` (SWA, EMA)", then_train(average), {3: PARTITIONED}),
    Row("`torch.compile(model)`", then_train(compiled)),
    Row("`torch.func.functional_call`", then_train(functional)),
    Row("`torch.func.functional_call` with other parameters", then_train(functional_with_others)),
    Row("`model.share_memory()`", then_train(lambda t: t.model.share_memory()), {3: PARTITIONED}),
    Row("`DistributedDataParallel(model)`", then_train(data_parallel),
        {**{s: "inside DistributedDataParallel" for s in range(3)}, 3: PARTITIONED}),
    Row("`fully_shard(model)`", then_train(fully_sharded),
        {**{s: "was replaced by another parameter" for s in range(3)}, 3: PARTITIONED}),
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_mean_what_they_mean_in_torch(stage):
    assert not (wrong := unexpected(ROWS, stage, run_ranks(outcomes, 2, ROWS, stage))), "\n".join(wrong)


@pytest.mark.parametrize("stage", [0, 2])
def test_with_masters_of_their_own(stage):
    rows = [row for row in ROWS if row.run is not there_and_back]
    assert not (wrong := unexpected(rows, stage, run_ranks(outcomes, 2, rows, stage, torch.bfloat16))), "\n".join(wrong)


def test_one_rank():
    rows = [dataclasses.replace(row, raises={} if row.expected(0) == "same" else row.expected(0)) for row in ROWS]
    rows = [
        row
        for row in rows
        if row.name not in ("writes that differ between the ranks", "`DistributedDataParallel(model)`")
    ]
    assert not (wrong := unexpected(rows, 1, run_ranks(outcomes, 1, rows, 1))), "\n".join(wrong)
    assert not (wrong := worse(ROWS, 3, run_ranks(outcomes, 1, ROWS, 3)[0])), "\n".join(wrong)


def test_the_readme_says_what_is_tested():
    assert not (wrong := misdocumented(ROWS, README.read_text(), "Parameters and modules")), "\n".join(wrong)
