"""Extensions: objects that the engine is given, or that installed packages offer for a section of the configuration."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import ClassVar

import dsx
import pytest
import torch
from dsx.config import Section
from dsx.engine.errors import EngineArgumentError
from dsx_core import Finding
from dsx_testkit import run_ranks
from pydantic import BaseModel, Field
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 0,
}


class Recording(dsx.Extension):
    """Writes down what it is called with."""

    def __init__(self):
        self.calls = []

    def begin(self, keys, model, rank):
        self.calls.append(("begin", keys["zero_optimization"], sum(p.numel() for p in model.parameters()), rank))

    def prepare(self, keys, request):
        self.calls.append(("prepare", keys["zero_optimization"]["stage"]))
        return request

    def configured(self, config):
        self.calls.append(("configured", config.zero.stage, torch.distributed.is_initialized()))

    def before_shard(self, request, config, topology):
        self.calls.append(("before_shard", sum(p.numel() for p in request.model.parameters()), topology.world_size))
        return request

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
        before = [("begin", {"stage": 3}, 5, rank), ("prepare", 3), ("configured", 3, True), ("before_shard", 5, 2)]
        assert one[:4] == two[:4] == before
        assert one[4][:2] == two[4][:2] == ("join", 2)
        assert two[4][2] == one[4][2] + 1, "the order is the one that was given"
        assert one[5:] == [("forward", 2), ("update",), ("step", 1)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Recording(), "got Recording, expected a list"),
        ([Recording], "got the class Recording, expected an object"),
        ([nn.Linear(1, 1)], "got a Linear without begin, prepare, configured, before_shard, join, state"),
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
    monkeypatch.setattr("dsx.config.sections.entry_points", lambda *, group: found if group == "dsx.extensions" else [])


def test_an_installed_extension_is_made_for_its_section_only(monkeypatch):
    made = []

    class Installed(Recording):
        def __init__(self):
            super().__init__()
            made.append(self)

    offered(monkeypatch, csv_monitor=Installed, jsonl=Installed)
    engine, *_ = dsx.initialize(model=nn.Linear(4, 1), config=dict(CONFIG))
    engine.destroy()
    assert made == []
    for _ in range(2):
        engine, *_ = dsx.initialize(model=nn.Linear(4, 1), config={**CONFIG, "csv_monitor": {"enabled": False}})
        engine.destroy()
    names = ["begin", "prepare", "configured", "before_shard", "join"]
    assert [[call[0] for call in one.calls] for one in made] == [names] * 2


def test_a_wrong_configuration_is_said_and_no_extension_is_asked(monkeypatch):
    one = Recording()
    with pytest.raises(dsx.DsxConfigError, match="zero_optimization"):
        dsx.initialize(model=nn.Linear(4, 1), config={**CONFIG, "zero_optimization": {"stage": 9}}, extensions=[one])
    assert [call[0] for call in one.calls] == ["begin", "prepare"]
    with pytest.raises(dsx.DsxConfigError):
        dsx.initialize(model=nn.Linear(4, 1), config="/nowhere/dsx.json", extensions=[one])
    assert len(one.calls) == 2


def test_the_autotuner_is_installed_as_an_extension():
    from dsx.features import installed_extensions
    from dsx_plan.trials import Trial

    assert installed_extensions({}) == []
    (found,) = installed_extensions({"autotuning": {"enabled": True}, "zero_optimization": {}})
    assert isinstance(found, Trial)


# - The section of an extension


class Averaging(Section):
    """Average of the weights."""

    NO_EFFECT: ClassVar[dict[str, str]] = {"foreach": "it is always done so"}

    decay: float = Field(0.5, description="share of the average that stays")
    warmup: int = Field(0, description="updates before the first average")
    foreach: bool = Field(True, description="all tensors at once")

    def findings(self):
        if self.decay == 0:
            yield Finding("decay", "nothing of the average stays", "0", "more than 0", "raise it, or leave it out")


class Average(dsx.Extension):
    """Keeps an average of all parameters, and counts the updates."""

    name, section = "averaging", Averaging

    def configured(self, config):
        self.decay = config.use("averaging").decay

    def join(self, watch, to):
        self.module, self.values, self.updates = to.module, {}, 0
        watch.add(self)

    def after_step(self, report):
        self.updates += 1
        with dsx.zero.GatheredParameters(list(self.module.parameters())):
            now = {name: value.detach().clone() for name, value in self.module.named_parameters()}
        old = self.values or now
        self.values = {name: self.decay * old[name] + (1 - self.decay) * value for name, value in now.items()}

    def state(self):
        return self

    def state_dict(self):
        return {"updates": self.updates, "values": dict(self.values)}

    def load_state_dict(self, state):
        self.updates, self.values = state["updates"], dict(state["values"])


def built(extensions, **keys):
    torch.manual_seed(0)
    engine, *_ = dsx.initialize(model=nn.Linear(4, 1), config={**CONFIG, **keys}, extensions=extensions)
    return engine


def test_an_extension_is_given_its_section_with_defaults_and_all_of_it_is_explained():
    one = Average()
    engine = built([one], averaging={"decay": 0.25, "foreach": False})
    assert one.decay == 0.25
    assert engine.config.averaging.warmup == 0 and engine.config.to_dict()["averaging"]["decay"] == 0.25
    rows = {row.path: row for row in engine.config.explain().rows}
    assert rows["averaging.decay"].origin == "dictionary" and rows["averaging.warmup"].origin == "default"
    assert any("averaging.foreach: it is always done so" in warning for warning in engine.config.warnings)
    copy = pickle.loads(pickle.dumps(engine.config))
    assert copy.averaging == engine.config.averaging and copy.root == engine.config.root
    engine.destroy()


@pytest.mark.parametrize(
    ("section", "texts"),
    [
        ({"decai": 0.25}, ["averaging.decai", 'unknown key "decai"', "averaging.decay", "DSX101"]),
        ({"decay": "much"}, ["averaging.decay", "wrong type", "a number"]),
        ({"decay": 0}, ["averaging.decay: nothing of the average stays", "raise it, or leave it out"]),
        (3, ["averaging", "an object"]),
    ],
)
def test_a_wrong_section_of_an_extension_is_refused_by_name_together_with_all_else(section, texts):
    with pytest.raises(dsx.DsxConfigError) as caught:
        built([Average()], averaging=section, zero_optimisation={"stage": 1})
    for text in [*texts, "zero_optimization"]:
        assert text in str(caught.value)


def test_a_mistyped_section_names_that_of_the_extension():
    for given, wrong, right in (([Average()], "avraging", "averaging"), ([], "autotunning", "autotuning")):
        with pytest.raises(dsx.DsxConfigError, match=f'did you mean "{right}"'):
            built(given, **{wrong: {}})


def test_a_section_without_its_extension_is_unknown():
    with pytest.raises(dsx.DsxConfigError, match='unknown key "averaging"'):
        built([], averaging={})


def test_an_extension_without_its_section_gets_the_defaults_also_for_null():
    for keys in ({}, {"averaging": None}):
        one = Average()
        built([one], **keys).destroy()
        assert one.decay == 0.5


class Loose(BaseModel):
    anything: int = 0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"section": Loose}, dsx.DsxConfigError, "accepts keys that it does not know"),
        ({"section": int}, dsx.DsxConfigError, "expected:.*a pydantic model"),
        ({"name": "fp16"}, dsx.DsxConfigError, "a section that dsx has"),
        ({"name": ""}, EngineArgumentError, "a Changed with a section and without a name"),
    ],
)
def test_an_extension_with_a_section_that_cannot_be_is_refused(change, error, text):
    with pytest.raises(error, match=text):
        built([type("Changed", (Average,), change)()])


def test_two_extensions_of_one_name_are_refused():
    with pytest.raises(EngineArgumentError, match="two extensions with the name 'averaging'"):
        built([Average(), Average()])


# - The state of an extension


def averaged(rank, world, folder, load):
    one = Average()
    engine = built([one], averaging={"decay": 0.5})
    if load:
        engine.load_checkpoint(folder)
    else:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.save_checkpoint(folder)
    found = one.state_dict()
    engine.destroy()
    return found


def test_the_state_of_an_extension_is_saved_and_loaded_at_another_number_of_ranks(tmp_path):
    saved = run_ranks(averaged, 2, str(tmp_path), False)
    loaded = averaged(0, 1, str(tmp_path), True)
    assert loaded["updates"] == saved[0]["updates"] == 3
    for name, value in saved[0]["values"].items():
        assert torch.equal(loaded["values"][name], value)


def test_a_state_that_is_missing_or_that_nobody_takes_is_named(tmp_path, caplog):
    with_it, without = built([Average()]), built([])
    with_it.save_checkpoint(tmp_path / "with")
    without.save_checkpoint(tmp_path / "without")
    with_it.load_checkpoint(tmp_path / "without")
    assert "it has no state of averaging" in caplog.text
    without.load_checkpoint(tmp_path / "with")
    assert "it has states of averaging" in caplog.text and "DSX554" in caplog.text
    with_it.destroy()
    without.destroy()


# - The features of dsx itself


def test_the_features_take_part_in_the_order_that_is_declared(monkeypatch):
    from dsx import features

    calls = []

    def noted(kind, method):
        whole = getattr(kind, method)

        def note(self, *args):
            calls.append((method, kind.__name__))
            return whole(self, *args)

        monkeypatch.setattr(kind, method, note)

    for kind in features.FEATURES:
        for method in ("prepare", "before_shard", "join"):
            noted(kind, method)
    built([Average()]).destroy()
    declared = [kind.__name__ for kind in features.FEATURES]
    for method in ("prepare", "before_shard", "join"):
        assert [name for called, name in calls if called == method] == declared


def test_the_declared_order_is_the_one_that_the_features_need():
    from dsx import features

    place = {kind.__name__: number for number, kind in enumerate(features.FEATURES)}
    needed = [
        ("Experts", "Pipelines"),  # converted layers are made units of ZeRO
        ("Compression", "Pipelines"),
        ("Sequences", "Pipelines"),  # slices look for the axis of sequences
        ("TokenDrop", "LayerDrop"),  # a layer that is skipped computes no tokens
        ("Monitoring", "Stragglers"),  # the clock comes first
        ("Monitoring", "Lines"),  # figures come before the lines that show them
        ("Stragglers", "Lines"),
        ("Trace", "Lines"),
        ("Curvature", "Lines"),
    ]
    assert [pair for pair in needed if place[pair[0]] > place[pair[1]]] == []
    assert len({kind.name for kind in features.FEATURES}) == len(features.FEATURES)


def test_ranks_with_other_extensions_are_told():
    for text in run_ranks(differing, 2):
        assert "initialize(extensions=...)" in text


def differing(rank, world):
    try:
        built([Recording()] if rank else [])
    except Exception as error:
        return str(error)
    return ""


def test_the_wiring_and_the_parts_stay_small():
    import dataclasses
    from pathlib import Path

    from dsx import wiring
    from dsx.engine.parts import EngineParts

    assert len(dataclasses.fields(EngineParts)) <= 15
    assert len(Path(wiring.__file__).read_text().splitlines()) <= 250
