"""Extensions: objects that the engine is given, or that installed packages offer for a section of the configuration."""

from __future__ import annotations

from types import SimpleNamespace

import dsx
import pytest
import torch
from dsx.engine.errors import EngineArgumentError
from dsx_testkit import run_ranks
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 0,
}


class Recording:
    """Writes down what it is called with."""

    def __init__(self):
        self.calls = []

    def begin(self, keys, model, rank):
        self.calls.append(("begin", keys["zero_optimization"], sum(p.numel() for p in model.parameters()), rank))

    def configured(self, config):
        self.calls.append(("configured", config.zero.stage, torch.distributed.is_initialized()))

    def join(self, watch, to):
        self.calls.append(("join", to.topology.world_size, len(watch.observers)))
        watch.add(self)

    def before_forward(self, args, kwargs):
        self.calls.append(("forward", args[0].shape[0]))

    micro_batch_read = before_backward = lambda self, *given: None

    def before_update(self):
        self.calls.append(("update",))

    def after_step(self, report):
        self.calls.append(("step", report.global_step))


def trained(rank, world):
    one, two = Recording(), Recording()
    engine, *_ = dsx.initialize(model=nn.Linear(4, 1), config=dict(CONFIG), extensions=[one, two])
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.destroy()
    return one.calls, two.calls


def test_an_extension_sees_the_model_the_configuration_and_every_step():
    for rank, (one, two) in enumerate(run_ranks(trained, 2)):
        assert one[:2] == [("begin", {"stage": 3}, 5, rank), ("configured", 3, True)]
        assert one[3:] == [("forward", 2), ("update",), ("step", 1)]
        assert one[2][:2] == two[2][:2] == ("join", 2)
        assert two[2][2] == one[2][2] + 1, "the order is the one that was given"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Recording(), "got Recording, expected a list"),
        ([Recording], "got the class Recording, expected an object"),
        ([nn.Linear(1, 1)], "got a Linear without begin, configured, join"),
    ],
)
def test_what_is_no_extension_is_refused_before_anything_is_changed(given, text):
    model = nn.Linear(4, 1)
    with pytest.raises(EngineArgumentError, match=text):
        dsx.initialize(model=model, config=dict(CONFIG), extensions=given)
    assert type(model.weight) is nn.Parameter and model.weight.numel() == 4


def offered(monkeypatch, **made):
    """Let installed packages offer these, by section."""
    found = [SimpleNamespace(name=name, load=lambda make=make: make) for name, make in made.items()]
    monkeypatch.setattr("dsx.extension.entry_points", lambda *, group: found if group == "dsx.extensions" else [])


def test_an_installed_extension_is_made_for_its_section_only(monkeypatch):
    made = []

    def make():
        made.append(Recording())
        return made[-1]

    offered(monkeypatch, autotuning=make, csv_monitor=make)
    engine, *_ = dsx.initialize(model=nn.Linear(4, 1), config=dict(CONFIG))
    engine.destroy()
    assert made == []
    for _ in range(2):
        engine, *_ = dsx.initialize(model=nn.Linear(4, 1), config={**CONFIG, "autotuning": {"enabled": False}})
        engine.destroy()
    assert [[call[0] for call in one.calls] for one in made] == [["begin", "configured", "join"]] * 2


def test_a_wrong_configuration_is_said_and_no_extension_is_asked(monkeypatch):
    one = Recording()
    with pytest.raises(dsx.DsxConfigError, match="zero_optimization"):
        dsx.initialize(model=nn.Linear(4, 1), config={**CONFIG, "zero_optimization": {"stage": 9}}, extensions=[one])
    assert [call[0] for call in one.calls] == ["begin"]
    with pytest.raises(dsx.DsxConfigError):
        dsx.initialize(model=nn.Linear(4, 1), config="/nowhere/dsx.json", extensions=[one])
    assert len(one.calls) == 1


def test_the_autotuner_is_installed_as_an_extension():
    from dsx.extension import installed_extensions
    from dsx_plan.trials import Trial

    assert installed_extensions({}) == []
    (found,) = installed_extensions({"autotuning": {"enabled": True}, "zero_optimization": {}})
    assert isinstance(found, Trial)
