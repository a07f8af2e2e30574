"""What others add without a change in dsx: an optimizer by name, a compression method, a checkpoint importer, a
conversion of layers to FP8. Each is one class here, and an entry point where it is found by a name.
"""

from __future__ import annotations

from types import SimpleNamespace

import dsx
import pytest
import torch
from dsx.config import Section
from dsx_checkpoint import CheckpointError
from dsx_testkit import run_ranks
from pydantic import Field
from torch import nn
from torch.nn.utils import parametrize

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0,
    "steps_per_print": 0,
}


def offer(monkeypatch, module, group, **made):
    """Let installed packages offer these."""
    found = [SimpleNamespace(name=name, value=f"toys:{name}", load=lambda one=one: one) for name, one in made.items()]
    monkeypatch.setattr(f"{module}.entry_points", lambda *, group: found if group == wanted else [])
    wanted = group


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(steps=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(steps)]


def trained(built, config, stage, extensions=()):
    """The losses, and the weights after them."""
    whole = {**CONFIG, **config, "zero_optimization": {"stage": stage}}
    engine, *_ = dsx.initialize(model=built, config=whole, extensions=extensions)
    losses = []
    for batch in batches():
        loss = engine(batch).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    weights = engine.module_state_dict()
    engine.destroy()
    return losses, weights


# - An optimizer by name


class SignDescent(torch.optim.Optimizer):
    """Steps by the sign of the gradient."""

    def __init__(self, params, lr=0.01, decay=0.0):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["decay"]).sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_of_another_package_is_named_in_the_configuration(monkeypatch, stage):
    offer(monkeypatch, "dsx.config.components", "dsx.optimizers", SignDescent=SignDescent)
    section = {"type": "signdescent", "params": {"lr": 0.05, "decay": 0.1}}
    losses, weights = trained(model(), {"optimizer": section}, stage)
    plain = model()
    optimizer = SignDescent(plain.parameters(), lr=0.05, decay=0.1)
    for batch, loss in zip(batches(), losses):
        expected = plain(batch).square().mean()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value)


@pytest.mark.parametrize(
    ("section", "texts"),
    [
        ({"type": "SignDescent", "params": {"deca": 1}}, ["optimizer.params.deca", 'did you mean "decay"']),
        ({"type": "SignDescnt"}, ["optimizer.type", 'did you mean "SignDescent"']),
    ],
)
def test_mistakes_with_such_an_optimizer_name_the_right_word(monkeypatch, section, texts):
    offer(monkeypatch, "dsx.config.components", "dsx.optimizers", SignDescent=SignDescent)
    with pytest.raises(dsx.DsxConfigError) as caught:
        trained(model(), {"optimizer": section}, 0)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "offered", "text"),
    [("adamw", SignDescent, "takes a name that is taken"), ("Mine", nn.Linear, "is no class of an optimizer")],
)
def test_an_optimizer_that_cannot_be_offered_is_refused(monkeypatch, name, offered, text):
    offer(monkeypatch, "dsx.config.components", "dsx.optimizers", **{name: offered})
    with pytest.raises(dsx.DsxConfigError, match=text):
        trained(model(), {"optimizer": {"type": "NAdam"}}, 0)


# - A compression method


class Ternary(nn.Module):
    """A weight of which the forward sees -s, 0 or s per tensor; the gradient passes unchanged."""

    on = False

    def forward(self, weight):
        if not self.on:
            return weight
        scale = weight.detach().abs().mean()
        rounded = (weight.detach() / scale).round().clamp(-1, 1) * scale
        return weight + (rounded - weight).detach()


class TernarySection(Section):
    """Weights of three values."""

    layers: list[str] = Field(default_factory=list, description="names of the layers")
    offset: int = Field(0, description="updates after which it begins")


class TernaryWeights(dsx.Extension):
    """The section `ternary_weights`."""

    name, section = "ternary_weights", TernarySection

    def configured(self, config):
        self.settings, self.updates = config.use(self.name), 0

    def before_shard(self, request, config, topology):
        dsx.zero.release_model(request.model)
        self.techniques = [Ternary() for _ in self.settings.layers]
        for name, technique in zip(self.settings.layers, self.techniques):
            parametrize.register_parametrization(request.model.get_submodule(name), "weight", technique)
        return request

    def join(self, watch, to):
        watch.add(self)
        self.switch()

    def switch(self):
        for technique in self.techniques:
            technique.on = self.updates >= self.settings.offset

    def after_step(self, report):
        self.updates += report.applied
        self.switch()

    def state(self):
        return self

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        self.switch()


def ternary_by_hand():
    plain, technique = model(), Ternary()
    parametrize.register_parametrization(plain[0], "weight", technique)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for step, batch in enumerate(batches()):
        technique.on = step >= 1
        loss = plain(batch).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def ternary(rank, world, stage):
    section = {"ternary_weights": {"layers": ["0"], "offset": 1}}
    return trained(model(), section, stage, [TernaryWeights()])[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compression_method_is_an_extension(stage):
    expected = ternary_by_hand()
    assert ternary(0, 1, stage) == pytest.approx(expected, rel=1e-5)
    for losses in run_ranks(ternary, 2, stage):  # both ranks train on the same batches
        assert losses == pytest.approx(expected, rel=1e-5)


# - A conversion of layers to FP8


class Fp8Linear(nn.Linear):
    """Multiplies numbers of 8 bits, with a scale for each tensor; keeps its parameters as they are."""

    def forward(self, inputs):
        return nn.functional.linear(in_fp8(inputs), in_fp8(self.weight), self.bias)


def in_fp8(value):
    scale = value.detach().abs().max().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (value.detach() / scale).to(torch.float8_e4m3fn).to(value.dtype) * scale
    return value + (rounded - value).detach()


class Fp8Section(Section):
    """Linear layers in FP8."""

    enabled: bool = Field(False, description="switches the section on")
    skip: list[str] = Field(default_factory=list, description="names of layers that stay")


class Fp8(dsx.Extension):
    """The section `eight_bits`; `fp8` is that of dsx itself."""

    name, section = "eight_bits", Fp8Section

    def before_shard(self, request, config, topology):
        settings = config.use(self.name)
        for name, layer in request.model.named_modules() if settings.enabled else ():
            if type(layer) is nn.Linear and name not in settings.skip:
                layer.__class__ = Fp8Linear
        return request


def in_8_bits(rank, world, stage):
    return trained(model(), {"eight_bits": {"enabled": True, "skip": ["2"]}}, stage, [Fp8()])[0]


def test_a_conversion_to_fp8_is_an_extension():
    plain = model()
    plain[0].__class__ = Fp8Linear
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for batch in batches():
        loss = plain(batch).square().mean()
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert in_8_bits(0, 1, 0) == pytest.approx(expected, rel=1e-6)
    assert in_8_bits(0, 1, 3) == pytest.approx(expected, rel=1e-6)
    for losses in run_ranks(in_8_bits, 2, 3):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert trained(model(), {"eight_bits": {"enabled": False}}, 0, [Fp8()])[0] != pytest.approx(expected, rel=1e-6)


# - A checkpoint importer


class CommaSeparated:
    """Weights as lines of text: name, then numbers."""

    def recognises(self, path):
        return path.suffix == ".weights"

    def read(self, path, tag):
        from dsx_checkpoint.foreign.source import Source, Tensor

        rows = [line.split(",") for line in path.read_text().splitlines()]
        if any(len(row) < 2 for row in rows):
            raise CheckpointError(f"{path}: a line has no numbers")
        values = {name: torch.tensor([float(n) for n in numbers]) for name, *numbers in rows}
        return Source("lines of text", {name: Tensor.of(value) for name, value in values.items()})


def test_an_importer_of_another_package_reads_its_checkpoints(monkeypatch, tmp_path):
    from dsx_checkpoint.command import main

    offer(monkeypatch, "dsx_checkpoint.foreign.recognising", "dsx_checkpoint.importers", lines=CommaSeparated)
    file = tmp_path / "model.weights"
    file.write_text("bias,0.5,-1\nscale,2,3\n")
    assert main(["import", str(file), str(tmp_path / "ours")]) == 0

    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return x * self.scale + self.bias

    engine, *_ = dsx.initialize(model=Affine(), config={**CONFIG, "zero_optimization": {"stage": 1}})
    engine.load_checkpoint(tmp_path / "ours", load_module_only=True)
    assert engine(torch.ones(1, 2)).tolist() == [[2.5, 2.0]]
    engine.destroy()
    file.write_text("bias\n")
    with pytest.raises(CheckpointError, match="a line has no numbers"):
        dsx.checkpoint.read_foreign(file)
