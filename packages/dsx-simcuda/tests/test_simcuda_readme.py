"""The README's programs run as they stand, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.S | re.M)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_it_runs(built, number, tmp_path):
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
