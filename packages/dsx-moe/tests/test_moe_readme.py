"""The Python blocks of the README run unchanged on one rank, and the first one on two ranks too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.S | re.M) if README.exists() else []
PROGRAMS = [
    (BLOCKS[0], [sys.executable]),
    (BLOCKS[0], [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]),
    (BLOCKS[1], [sys.executable]),
]  # fmt: skip


@pytest.mark.parametrize(("code", "command"), PROGRAMS, ids=["alone", "two ranks", "hugging face"])
def test_a_block_runs(code, command, tmp_path):
    if "transformers" in code:
        pytest.importorskip("transformers")
    (tmp_path / "block.py").write_text(code)
    done = subprocess.run([*command, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    if "print" in code:
        assert "loss" in done.stdout
