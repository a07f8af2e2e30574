"""Names of DeepSpeed that left dsx: reachable where dsx-compat is installed, else the error says how to install it."""

import importlib
import sys

import dsx
import pytest
import torch
from dsx.deepspeed_names import PLACES

NAMES = [(module, name) for module, names in PLACES.items() for name in names]


def owner_of(name):
    """The module of the name; for the engine an engine."""
    if name != "dsx.Engine":
        return importlib.import_module(name)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return dsx.initialize(model=torch.nn.Linear(1, 1), config=config)[0]


@pytest.fixture
def without_compat(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "dsx_compat"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dsx_compat", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "dsx.accelerator", raising=False)
    monkeypatch.delattr(dsx, "accelerator", raising=False)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_error_names_the_package_to_install(without_compat, module, name):
    owner = owner_of(module)
    with pytest.raises(AttributeError, match=rf"{module}\.{name} .* pip install --no-deps \./packages/dsx-compat"):
        getattr(owner, name)
    assert not hasattr(owner, name)


def test_the_old_module_says_so_too(without_compat):
    with pytest.raises(ImportError, match="pip install"):
        importlib.import_module("dsx.accelerator")


@pytest.mark.parametrize("module", PLACES)
def test_a_misspelt_name_is_an_ordinary_error(without_compat, module):
    with pytest.raises(AttributeError, match=r"has (no|an) attribute 'nothing_like_it'"):
        owner_of(module).nothing_like_it
