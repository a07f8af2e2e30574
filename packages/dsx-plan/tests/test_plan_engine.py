"""The planner is given its engine, or finds the installed one; without one it says what to install."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import dsx_plan
import pytest
from dsx_plan import Machine, NoEngineError, PlanError, plan, search
from dsx_plan.autotuning import Autotuner
from dsx_plan.command import main
from dsx_plan.engine import ENGINES, engine_to_plan
from dsx_plan.searching import usual_space
from torch import nn


class WrongConfig(ValueError):
    problems = (SimpleNamespace(path="stage", message="there is none"),)


class Engine:
    """Reads configurations, all of which are wrong."""

    config_error = WrongConfig

    def read(self, source):
        return dict(source)

    def load(self, source, *, world_size, template=False):
        raise WrongConfig(f"the configuration of {world_size} ranks is wrong")


def installed(monkeypatch, *engines):
    """Let these be the registered engines."""
    found = [SimpleNamespace(name=name, load=lambda made=made: made) for name, made in engines]
    monkeypatch.setattr("dsx_plan.engine.entry_points", lambda *, group: found if group == ENGINES else [])


def test_a_plan_without_an_engine_says_what_to_install(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(NoEngineError, match="install dsx"):
        plan(nn.Linear(1, 1), {}, world_size=1, machine="A100-80")
    with pytest.raises(NoEngineError, match="install dsx"):
        search(nn.Linear(1, 1), {}, {"a": [1]}, world_size=1, machine="A100-80")
    with pytest.raises(NoEngineError, match="install dsx"):
        usual_space({}, 8)
    with pytest.raises(NoEngineError, match="install dsx"):
        Autotuner(["--deepspeed_config", "x.json"], lambda nodes, devices: pytest.fail("no job is asked for"))
    assert issubclass(NoEngineError, PlanError)


def test_the_installed_engine_is_made_and_one_that_is_handed_in_comes_first(monkeypatch):
    installed(monkeypatch, ("one", lambda: "made"))
    assert engine_to_plan() == "made"
    installed(monkeypatch, ("one", Engine), ("two", Engine))
    with pytest.raises(NoEngineError, match=r"2 engines to plan with \(one, two\).*engine="):
        engine_to_plan()
    given = Engine()
    assert engine_to_plan(given) is given
    with pytest.raises(WrongConfig, match="of 4 ranks is wrong"):
        plan(nn.Linear(1, 1), {}, world_size=4, machine="A100-80", engine=given)


def test_the_command_needs_an_engine_for_plans_only(monkeypatch, capsys, tmp_path):
    installed(monkeypatch)
    (tmp_path / "dsx.json").write_text("{}")
    (tmp_path / "model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(1, 1)\n")
    words = [f"{tmp_path}/model.py:make", "-c", f"{tmp_path}/dsx.json", "-n", "2", "-m", "H100-SXM"]
    assert main(words) == 1
    assert "install dsx" in capsys.readouterr().err
    assert main(["machines"]) == 0
    assert "H100-SXM: " in capsys.readouterr().out


def test_every_public_name_is_found_and_importing_the_package_loads_no_torch():
    assert [name for name in dsx_plan.__all__ if not hasattr(dsx_plan, name)] == []
    assert dsx_plan.Machine is Machine
    with pytest.raises(AttributeError, match="no attribute 'plans_of'"):
        _ = dsx_plan.plans_of
    code = "import dsx_plan, dsx_plan.command, dsx_plan.autotuning, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
