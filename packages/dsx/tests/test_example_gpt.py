"""The main job, small: two processes at ZeRO 2, a checkpoint, one process at ZeRO 3 that goes on with the same loss."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32"]

# The examples are not part of the distribution: away from the repository there is nothing to test.
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are in the repository only")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder with some text, and a binary file that must not be read as such."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 4000)
    (folder / "b.bin").write_bytes(bytes(range(256)) * 4000)
    return folder


def run(*arguments: str | Path, script: str = "train_gpt.py", cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


def validation(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [(e["step"], e["value"]) for e in lines if e["label"] == "Validation/Samples/bits_per_byte"]


def test_the_demo_learns_and_goes_on_with_another_sharding(tmp_path, text):
    done = run("--out", "out", "--steps", "24", "--data", text, *SMALL, script="demo.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    bits = validation(out)
    assert [samples for samples, _ in bits] == [0, 21 * 32, 21 * 32, 24 * 32]
    assert 7 < bits[0][1] < 9 and bits[-1][1] < bits[0][1] - 1.5
    assert bits[1][1] == pytest.approx(bits[2][1], abs=1e-3)
    with (out / "csv" / "Train_Samples_train_loss.csv").open(newline="") as stream:
        assert [row[0] for row in csv.reader(stream)] == ["step", *(str(32 * n) for n in range(1, 25))]
    starts = json.loads((out / "meta.json").read_text())["starts"]
    assert [(s["world_size"], s["step"]) for s in starts] == [(2, 0), (1, 21 * 32)]
    assert sorted(p.name for p in (out / "memory").iterdir()) == ["rank00000.jsonl", "rank00001.jsonl"]
    page = (out / "report.html").read_text()
    assert "Bits per byte" in page and "rank 1" in page and "a sample of 300 bytes" in done.stdout


def test_an_earlier_run_is_not_mixed_with_a_new_one(tmp_path, text):
    out = tmp_path / "out"
    out.mkdir()
    (out / "meta.json").write_text("{}")
    done = run("--out", out, "--data", text, cwd=tmp_path)
    assert done.returncode == 2 and "--resume" in done.stderr


def test_data_that_is_no_text_is_refused(tmp_path, text):
    done = run("--data", text / "b.bin", cwd=tmp_path)
    assert done.returncode != 0 and "expected a text file or a folder of text files" in done.stderr
    assert not (tmp_path / "runs").exists()
