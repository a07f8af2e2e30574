"""The Python blocks of the README run unchanged on one rank, and the first two on two ranks too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.S | re.M) if README.exists() else []
ALONE = [sys.executable]
TWO = [*ALONE, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
PROGRAMS = [(BLOCKS[0], ALONE), (BLOCKS[0], TWO), (BLOCKS[1], ALONE), (BLOCKS[1], TWO), (BLOCKS[2], ALONE)]
NAMES = ["alone", "two ranks", "ddp alone", "ddp on two ranks", "hugging face"]


@pytest.mark.parametrize(("code", "command"), PROGRAMS, ids=NAMES)
def test_a_block_runs(code, command, tmp_path):
    if "transformers" in code:
        pytest.importorskip("transformers")
    (tmp_path / "block.py").write_text(code)
    done = subprocess.run([*command, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    if "print" in code:
        assert "loss" in done.stdout
