"""Programs of other projects train on dsx as with plain PyTorch: two CPU processes, random weights, no network.

Each case starts a program of `programs/` on two ranks. The program compares its curve of losses with plain PyTorch's
itself; where that is not written down (trl), the same program runs without an engine and the curves are compared here.
Skipped where the clients are not installed: `tools/dev.py clients` makes the environments that have them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
NEEDS = {
    "accelerate_loop": ("accelerate",),
    "trainer": ("accelerate", "transformers"),
    "trl_loop": ("accelerate", "transformers", "peft", "trl", "datasets"),
    "lightning_loop": ("lightning",),
    "openrlhf_loop": ("openrlhf", "peft", "pylatexenc", "torchdata"),
    "verl_loop": ("verl", "peft", "tensordict", "ray", "codetiming", "hydra", "PIL"),
    "llamafactory_loop": ("llamafactory", "peft", "trl", "omegaconf"),
}
CLIENTS = (
    "accelerate", "transformers", "peft", "trl", "openrlhf", "verl", "llamafactory", "lightning", "datasets", "torch",
)  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property):
    """The report says which versions ran: the page on compatibility is made from it."""
    installed = {name: metadata.version(name) for name in CLIENTS if importlib.util.find_spec(name) is not None}
    record_testsuite_property("versions", json.dumps(installed))


def run(program: str, *words: object, results: Path, launcher: tuple[str, ...] = (), check: bool = True) -> list[dict]:
    """What the two ranks reported."""
    missing = [name for name in NEEDS.get(program, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: python3 tools/dev.py clients")
    results.mkdir(exist_ok=True)
    start = launcher or ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    paths = os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *start, str(PROGRAMS / f"{program}.py"), *map(str, words)],
        env={**os.environ, **ENVIRONMENT, "CLIENT_RESULTS": str(results), "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=280, cwd=results,
    )  # fmt: skip
    if not check:
        assert done.returncode != 0
        return [{"error": done.stderr}]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((results / f"rank{rank}.json").read_text()) for rank in range(2)]


def close(got: list[float], expected: list[float], absolute: float = 1e-12) -> None:
    assert got == pytest.approx(expected, rel=1e-5, abs=absolute), (got, expected)
    assert len(got) >= 6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate_trains_saves_and_resumes(stage, tmp_path):
    run("accelerate_loop", "--stage", stage, "--folder", tmp_path / "state", results=tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_accelerate_accumulates(stage, tmp_path):
    run("accelerate_loop", "--stage", stage, "--accumulation", 2, "--folder", tmp_path / "state", results=tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_offloads_to_the_host(stage, tmp_path):
    run("accelerate_loop", "--stage", stage, "--offload", "cpu", "--folder", tmp_path / "state", results=tmp_path)


def test_accelerate_notices_a_resume_that_loads_nothing(tmp_path):
    words = ("--stage", 2, "--folder", tmp_path / "state", "--skip-load")
    (found,) = run("accelerate_loop", *words, results=tmp_path, check=False)
    assert "resumed: got" in found["error"]


def test_accelerate_takes_optimizer_and_schedule_from_a_file(tmp_path):
    run("accelerate_loop", "--config", PROGRAMS.parent / "dummies.json", results=tmp_path)


def test_accelerate_launch_starts_it(tmp_path):
    launcher = ("accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1")
    launcher += (
        "--mixed_precision",
        "no",
        "--zero_stage",
        "2",
        "--gradient_clipping",
        "0.0",
        "--main_process_port",
        "0",
    )
    words = ("--from-environment", "--stage", 2, "--folder", tmp_path / "state")
    run("accelerate_loop", *words, results=tmp_path, launcher=launcher)


@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_with_auto_values_and_a_resume(stage, tmp_path):
    words = ("--stage", stage, "--config", PROGRAMS.parent / "auto.json", "--folder", tmp_path / "run")
    run("trainer", *words, results=tmp_path)
    run("trainer", *words, "--resume", results=tmp_path)


def test_trainer_from_pretrained_with_a_larger_vocabulary(tmp_path):
    words = ("--stage", 3, "--config", PROGRAMS.parent / "auto.json", "--folder", tmp_path / "run", "--resized")
    run("trainer", *words, results=tmp_path)


def test_trainer_notices_a_resume_that_loads_nothing(tmp_path):
    words = ("--stage", 3, "--config", PROGRAMS.parent / "auto.json", "--folder", tmp_path / "run")
    run("trainer", *words, results=tmp_path)
    (found,) = run("trainer", *words, "--resume", "--forget", results=tmp_path, check=False)
    assert "resumed: got" in found["error"]


@pytest.fixture(scope="module")
def without_engine(tmp_path_factory):
    """What a program does in two plain processes; each kind is run once."""
    known: dict[tuple, list[dict]] = {}

    def reference(*words: str, program: str = "trl_loop") -> dict:
        wanted = (program, *words)
        if wanted not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[wanted] = run(program, "--stage", -1, "--folder", folder / "run", *words, results=folder)
        return known[wanted][0]

    return reference


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("words", [("--tuner", "lora"), ("--tuner", "adalora"), ("--dpo", "--tuner", "none"),
                                   ("--dpo",)],
                         ids=["sft-lora", "sft-adalora", "dpo-reference", "dpo-lora"])  # fmt: skip
def test_trl_and_peft(stage, words, tmp_path, without_engine):
    expected = without_engine(*words)
    found = run("trl_loop", "--stage", stage, "--folder", tmp_path / "run", *words, results=tmp_path)[0]
    close(found["curve"], expected["curve"])
    assert {name: shape for name, (shape, _) in found["saved"].items()} == {
        name: shape for name, (shape, _) in expected["saved"].items()
    }
    for name, (_, norm) in found["saved"].items():
        assert norm == pytest.approx(expected["saved"][name][1], rel=1e-4), name


@pytest.mark.parametrize("stage", [2, 3])
def test_trl_generates_with_its_own_loop(stage, tmp_path, without_engine):
    words = ("--grpo", "--tuner", "none")
    expected = without_engine(*words)
    found = run("trl_loop", "--stage", stage, "--folder", tmp_path / "run", *words, results=tmp_path)[0]
    close(found["curve"], expected["curve"], absolute=1e-7)  # differences of probabilities, some near zero
    assert any(abs(loss) > 1e-4 for loss in found["curve"]), "rewards were all alike: nothing was learned from"


def test_a_curve_of_trl_shows_an_update_that_was_left_out(tmp_path, without_engine):
    words = ("--tuner", "lora")
    found = run("trl_loop", "--stage", 2, "--folder", tmp_path / "run", *words, "--gap", results=tmp_path)[0]
    with pytest.raises(AssertionError):
        close(found["curve"], without_engine(*words)["curve"])


@pytest.mark.parametrize("stage", [2, 3])
def test_openrlhf_scores_trains_sleeps_and_pushes(stage, tmp_path, without_engine):
    expected = without_engine(program="openrlhf_loop")
    found = run("openrlhf_loop", "--stage", stage, "--folder", tmp_path / "run", results=tmp_path)[0]
    close(found["curve"], expected["curve"], absolute=1e-7)
    close(found["norms"], expected["norms"])
    assert found["sent"] == pytest.approx(expected["sent"], rel=1e-4)


def test_a_curve_of_openrlhf_shows_an_update_that_was_left_out(tmp_path, without_engine):
    found = run("openrlhf_loop", "--stage", 2, "--folder", tmp_path / "run", "--gap", results=tmp_path)[0]
    with pytest.raises(AssertionError):
        close(found["curve"], without_engine(program="openrlhf_loop")["curve"], absolute=1e-7)


@pytest.mark.parametrize(
    ("stage", "kind", "words"),
    [
        (2, "actor", ()),
        (3, "actor", ("--offload",)),
        (3, "lora", ()),
        (3, "critic", ()),
        (3, "actor", ("--sequence", 2)),
    ],
    ids=["2-actor", "3-actor-asleep", "3-lora", "3-critic", "3-actor-ulysses"],
)
def test_verl_steps_pushes_and_resumes(stage, kind, words, tmp_path, without_engine):
    words = ("--kind", kind, *words)
    alone = [word for word in words if word != "--offload"]
    expected = without_engine(*alone, program="verl_loop")
    found = run("verl_loop", "--stage", stage, "--folder", tmp_path / "run", *words, results=tmp_path)[0]
    for name in ("curve", "norms", "before"):
        close(found[name], expected[name], absolute=1e-6)
    assert found["sent"] == pytest.approx(expected["sent"], rel=1e-4)


def test_a_curve_of_verl_shows_an_update_that_was_left_out(tmp_path, without_engine):
    found = run("verl_loop", "--stage", 3, "--folder", tmp_path / "run", "--gap", results=tmp_path)[0]
    with pytest.raises(AssertionError):
        close(found["curve"], without_engine("--kind", "actor", program="verl_loop")["curve"], absolute=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("words", [("--tuner", "lora"), ("--kind", "dpo", "--tuner", "full")],
                         ids=["sft-lora", "dpo-reference"])  # fmt: skip
def test_llamafactory_trains_by_its_own_call(stage, words, tmp_path, without_engine):
    expected = without_engine(*words, program="llamafactory_loop")
    found = run("llamafactory_loop", "--stage", stage, "--folder", tmp_path / "run", *words, results=tmp_path)[0]
    close(found["curve"], expected["curve"], absolute=1e-6)
    assert {name: shape for name, (shape, _) in found["saved"].items()} == {
        name: shape for name, (shape, _) in expected["saved"].items()
    }
    for name, (_, norm) in found["saved"].items():
        assert norm == pytest.approx(expected["saved"][name][1], rel=1e-4), name


def test_a_curve_of_llamafactory_shows_an_update_that_was_left_out(tmp_path, without_engine):
    words = ("--tuner", "lora")
    found = run("llamafactory_loop", "--stage", 2, "--folder", tmp_path / "run", *words, "--gap", results=tmp_path)[0]
    with pytest.raises(AssertionError):
        close(found["curve"], without_engine(*words, program="llamafactory_loop")["curve"], absolute=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", [(), ("--fabric",)], ids=["trainer", "fabric"])
def test_lightning_trains_and_resumes(stage, kind, tmp_path):
    run("lightning_loop", "--stage", stage, "--folder", tmp_path / "state", *kind, results=tmp_path)
