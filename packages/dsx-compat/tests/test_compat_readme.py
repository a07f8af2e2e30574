"""The Python block of the README runs unchanged, on one rank and on two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.S | re.M) if README.exists() else []
COMMANDS = [[sys.executable], [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]]


@pytest.mark.parametrize("command", COMMANDS, ids=["alone", "two ranks"])
def test_a_block_runs(command, tmp_path):
    (tmp_path / "block.py").write_text(BLOCKS[0])
    done = subprocess.run([*command, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size([1, 8])" in done.stdout
