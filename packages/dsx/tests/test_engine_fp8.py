"""`dsx.fp8` and the section `fp8`: exact against torchao's layers on one process, and refused by name without them."""

from __future__ import annotations

import sys

import dsx
import dsx_comm
import pytest
import torch
from dsx.engine.errors import EngineArgumentError
from dsx.siblings import MissingPartError
from dsx_testkit import run_ranks
from torch import nn

torchao = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("torchao") is None, reason="torchao is not installed"
)
SIZE = 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE)) for _ in range(2)
        )
        self.odd = nn.Linear(SIZE, 3)
        self.lm_head = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x).float().square().mean() + self.odd(x).float().square().mean()


def config(stage, bf16, **fp8):
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "fp8": {"emulate": True, **fp8},
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
    }


def batch(step, dtype):
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step)).to(dtype)


def losses_of_torchao(recipe, steps=3):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = Net()
    chosen = {"tensorwise": None, "rowwise": "rowwise"}[recipe]
    settings = Float8LinearConfig(emulate=True)
    if chosen is not None:
        import dataclasses

        settings = dataclasses.replace(Float8LinearConfig.from_recipe_name(chosen), emulate=True)
    convert_to_float8_training(net.layers, config=settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        loss = net(batch(step, torch.float32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def losses_of_engine(rank, world, stage, recipe, expected):
    """All ranks have the same batch, so that each cast has the scale that it has on one process."""
    from torchao.float8.float8_linear import Float8Linear

    model = Net()
    given = model.layers[0][0].weight
    engine, *_ = dsx.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, False, recipe=recipe)
    )
    kinds = {name: type(module) for name, module in engine.module.named_modules() if isinstance(module, nn.Linear)}
    assert [kind is Float8Linear for kind in kinds.values()] == [True] * 4 + [False] * 2, kinds
    assert stage == 3 or engine.module.layers[0][0].weight is given
    found = []
    for step in range(len(expected)):
        loss = engine(batch(step, torch.float32))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert found == expected, (stage, recipe)
    engine.destroy()


@torchao
@pytest.mark.parametrize(("world", "stage", "recipe"), [
    (1, 0, "tensorwise"), (1, 3, "tensorwise"), (2, 1, "rowwise"), (2, 2, "tensorwise"), (2, 3, "tensorwise"),
    (2, 3, "rowwise"),
])  # fmt: skip
def test_losses_are_bitwise_those_of_torchao_on_one_process(world, stage, recipe):
    run_ranks(losses_of_engine, world, stage, recipe, losses_of_torchao(recipe))


def gathers(rank, world, folder):
    """Weights travel in 8 bits, one message in a step finds all scales, and checkpoints have masters in float32."""
    engine, *_ = dsx.initialize(model=Net(), config=config(3, True))
    for step in range(2):
        engine.backward(engine(batch(step, torch.bfloat16)))
        engine.step()
    groups = [group for unit in engine.optimizer.runtime.units for group in unit.groups if group.layout.numel]
    coded = sum(group.layout.numel for group in groups if group.key.hooked)
    plain = sum(2 * group.layout.numel for group in groups if not group.key.hooked)
    assert coded == 2 * 2 * SIZE * 2 * SIZE
    to = next(group for group in groups if group.key.hooked).ranks.gather_group
    for messages in (1, 0):  # the first forward behind a step, and the next one
        with dsx_comm.count_traffic() as traffic, torch.no_grad():
            engine(batch(2, torch.bfloat16))
        assert traffic.calls("all_reduce", group=to) == messages
        assert traffic.sent_bytes("all_gather_into_tensor", group=to) == (coded + plain) * (world - 1) / world
    engine.save_checkpoint(folder)
    whole = dsx.zero.full_state_dict(engine.optimizer, rank0_only=False)["model"]
    assert {p.dtype for p in whole.values()} <= {torch.float32, torch.bfloat16}
    again, *_ = dsx.initialize(model=Net(), config=config(1, True))
    again.load_checkpoint(folder)
    with torch.no_grad():
        assert torch.equal(again(batch(3, torch.bfloat16)), engine(batch(3, torch.bfloat16)))


@torchao
def test_weights_travel_in_8_bits_with_one_message_for_their_scales(tmp_path):
    run_ranks(gathers, 2, str(tmp_path))


@torchao
def test_what_cannot_be_converted_is_named():
    with pytest.raises(EngineArgumentError, match="expected one of tensorwise, rowwise"):
        dsx.fp8(Net(), "blockwise")
    with pytest.raises(EngineArgumentError, match="got text, expected a list"):
        dsx.fp8(Net(), exclude="lm_head")
    with pytest.raises(EngineArgumentError, match=r"without an nn\.Linear whose sizes are multiples of 16"):
        dsx.fp8(nn.Linear(8, 8))
    with pytest.raises(dsx.DsxConfigError, match="fp8"):
        dsx.initialize(model=Net(), config=config(0, False, recipe="blockwise"))
    assert type(dsx.fp8(nn.Linear(16, 16), emulate=True)).__name__ == "Float8Linear"


def test_without_torchao_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = Net()
    with pytest.raises(MissingPartError, match=r"pip install torchao"):
        dsx.initialize(model=model, config=config(0, False))
    assert type(model.layers[0][0]) is nn.Linear
