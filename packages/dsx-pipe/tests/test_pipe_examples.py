"""The example in three dimensions prints the same losses however the ranks are split."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt_3d.py"
# The examples are not part of the distribution: away from the repository there is nothing to test.
pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="the examples are in the repository only")


def losses(pipe, data, model, *more):
    count = pipe * data * model
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    split = ["--pipe", str(pipe), "--data", str(data), "--model", str(model), "--steps", "10"]
    command = [sys.executable, *(launch if count > 1 else []), str(EXAMPLE), *split, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(text) for text in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(found) == 2 and found[1] < found[0] < 6
    return found


def test_two_stages_learn_as_one_process():
    assert losses(2, 1, 1, "--schedule", "zb-h1") == pytest.approx(losses(1, 1, 1), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1, 1, 2), (1, 2, 1), (2, 2, 2)])
def test_other_splits_learn_as_one_process(split):
    assert losses(*split) == pytest.approx(losses(1, 1, 1), abs=2e-3)
