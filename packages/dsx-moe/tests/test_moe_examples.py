"""The examples run at a tiny size: experts on one process and on two, PR-MoE, and Mixture-of-Students."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# The examples are not part of the distribution: away from the repository there is nothing to test.
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are in the repository only")
SMALL = ["--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16", "--micro-batch-size", "4",
         "--lr", "0.02", "--moe-min-capacity", "4"]  # fmt: skip


def run(script, *arguments, processes=1):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(EXAMPLES / script), *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def held_out(text):
    return [float(found) for found in re.findall(r"held out ([0-9.]+) bits", text)]


def test_a_gpt_with_experts_learns_and_draws_their_load(tmp_path):
    picture = tmp_path / "load.svg"
    text = run("gpt_moe.py", "--num-experts", "4", "--topk", "2", "--train-iters", "20", "--eval-interval", "10",
               "--picture", str(picture))  # fmt: skip
    bits = held_out(text)
    assert len(bits) == 2 and bits[1] < bits[0] < 9 and len(re.findall(r"dropped [\d.]+% [\d.]+%", text)) == 2
    assert "<svg" in picture.read_text()


def test_experts_spread_over_two_processes(tmp_path):
    """Each process holds half of the experts. Only one process prints: one line for each evaluation."""
    sizes = []
    for processes in (1, 2):
        text = run("gpt_moe.py", "--num-experts", "4", "--moe-expert-parallel-size", str(processes), "--num-layers",
                   "2", "--train-iters", "4", "--eval-interval", "2", processes=processes)  # fmt: skip
        assert len(held_out(text)) == 2
        sizes.append(int(re.search(r"([\d,]+) parameters on this rank", text)[1].replace(",", "")))
    expert = 2 * 16 * 64 + 16 + 64
    assert sizes[0] - sizes[1] == 2 * expert


def test_a_pyramid_takes_fewer_parameters_than_residual_experts():
    rows = [line.split("|") for line in run("pr_moe.py", "--train-iters", "2").splitlines() if line.startswith("| ")]
    size = {row[1].strip(): int(row[2].replace(",", "")) for row in rows[1:]}
    assert list(size) == ["dense", "MoE, 8 experts", "Residual-MoE, 8 experts", "PR-MoE, 4 and 8 experts"]
    assert size["dense"] < size["PR-MoE, 4 and 8 experts"] < size["Residual-MoE, 8 experts"]


def test_a_student_learns_from_a_teacher_that_is_saved_and_read_again(tmp_path):
    pytest.importorskip("dsx_compress")
    teacher = tmp_path / "teacher.pt"
    flags = ["--mos", "--kd-stop-step", "2", "--train-iters", "4", "--hidden-size-teacher", "16", "--load-teacher"]
    first = run("mixture_of_students.py", *flags, str(teacher))
    assert len(held_out(first)) == 2 and teacher.stat().st_size > 10_000  # one line of the teacher, one of the student
    again = run("mixture_of_students.py", *flags, str(teacher))
    assert len(held_out(again)) == 1  # the teacher was read, not trained
    last = [re.search(r"student: .* ([\d.]+) bits per byte held out", text)[1] for text in (first, again)]
    assert last[0] == last[1]
