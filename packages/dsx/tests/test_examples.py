"""Every example runs at a tiny size, alone; those about several processes also on two; the table lists all of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# The examples are not part of the distribution: away from the repository there is nothing to test.
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are in the repository only")


def run(folder, script, *arguments, processes=1):
    launch = [] if processes == 1 else ["-m", "dsx.launcher", "--quiet", "--num_procs", str(processes)]
    command = [sys.executable, *launch, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first_and_last(text):
    return [float(number) for number in re.search(r"loss ([0-9.]+) -> ([0-9.]+)", text).groups()]


def test_the_table_lists_every_example():
    text = (EXAMPLES / "README.md").read_text()
    helpers = {"progress.py", "text_lab.py"}  # of train_gpt.py, and of the examples of dsx-compress
    assert set(re.findall(r"`(\w+\.py)`", text)) == {path.name for path in EXAMPLES.glob("*.py")} - helpers
    root = EXAMPLES.parents[2]
    others = {path for path in root.glob("packages/*/examples/*.py") if path.parent != EXAMPLES}
    names = {path.relative_to(root).as_posix() for path in others if path.name not in helpers}
    assert set(re.findall(r"^\| `(packages/[^`]+\.py)` \|", text, re.M)) == names


def test_bert(tmp_path):
    pytest.importorskip("transformers")
    text = run(tmp_path, "bert_masked.py", "--steps", "8", "--width", "32", "--layers", "2")
    before, after = map(float, re.search(r"loss: ([0-9.]+) before, ([0-9.]+) after 8 steps", text).groups())
    assert after < before
    assert list((tmp_path / "runs" / "bert").glob("global_step8"))


def test_vision_on_two_processes(tmp_path):
    text = run(tmp_path, "vision.py", "--steps", "20", processes=2)
    assert int(re.search(r"20 updates, (\d+)%", text)[1]) > 40  # chance is 25


def test_gan(tmp_path):
    assert "after 5 steps points are" in run(tmp_path, "gan.py", "--steps", "5")


def test_lora_saves_its_adapters_only(tmp_path):
    from safetensors import safe_open

    first, last = first_and_last(run(tmp_path, "lora.py", "--steps", "8", "--width", "32", processes=2))
    assert last < first
    with safe_open(tmp_path / "runs" / "lora" / "adapter.safetensors", "pt") as file:
        names = list(file.keys())
        assert len(names) == 8 and all(".up." in name or ".down." in name for name in names)
        assert any(file.get_tensor(name).abs().sum() > 0 for name in names if ".up." in name)


def test_grpo_learns_between_sleeps(tmp_path):
    text = run(tmp_path, "grpo.py", "--rounds", "12", processes=2)
    assert "round 10: reward" in text
    assert re.search(r"reward [0-9.]+ in the last round", text)
    assert list((tmp_path / "runs" / "grpo").glob("global_step12"))


def test_pipeline_on_two_stages_learns_as_on_one(tmp_path):
    one = first_and_last(run(tmp_path, "pipeline.py", "--steps", "4"))
    two = first_and_last(
        run(tmp_path, "pipeline.py", "--steps", "4", "--stages", "2", "--schedule", "zb-h1", processes=2)
    )
    assert one == two and one[1] < one[0]


def test_experts_on_two_processes(tmp_path):
    first, last = first_and_last(run(tmp_path, "experts.py", "--steps", "6", "--ep-size", "2", processes=2))
    assert last < first


def test_compress(tmp_path):
    text = run(tmp_path, "compress.py", "--steps", "80")
    assert "Linear(in_features=16, out_features=64" in text
    assert (tmp_path / "runs" / "compress" / "small.safetensors").stat().st_size < 2500  # fp32: 9.2 kB


def test_resume_elsewhere(tmp_path):
    assert "began at step 0 (new), ended at 3" in run(tmp_path, "resume_elsewhere.py", "--steps", "3", processes=2)
    text = run(tmp_path, "resume_elsewhere.py", "--steps", "5", "--stage", "3", "--offload")
    assert re.search(r"began at step 3 \(.*global_step3\), ended at 5", text)
