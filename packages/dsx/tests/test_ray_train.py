"""The loop of the guide under Ray Train: two workers, one of them fails, and training goes on from the checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray: python3 tools/dev.py clients")
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "trainers.md"
pytestmark = [
    pytest.mark.skipif(not GUIDE.is_file(), reason="the guides are in the repository only"),
    pytest.mark.timeout(900),  # Ray starts nine processes, one after the other
]


def program(folder):
    """The guide's script, with a failure of the first run behind its second epoch, and what each report said."""
    (code,) = (c for c in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.S | re.M) if "import ray" in c)
    change = [
        ("folder = tempfile.mkdtemp()", f"folder = {str(folder)!r}"),
        (
            "        train.report(",
            "        if rank == 0:\n"
            "            with open(f\"{settings['folder']}.jsonl\", 'a') as out:\n"
            "                out.write(f'[{first}, {epoch}, {loss.item()!r}]\\n')\n"
            "        if epoch == 2 and first == 0:\n"
            "            raise RuntimeError('this worker is lost')\n"
            "        train.report(",
        ),
    ]
    for old, new in change:
        assert old in code, old
        code = code.replace(old, new)
    return code


def test_training_goes_on_behind_a_failure(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(program(tmp_path))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert [(first, epoch) for first, epoch, _ in lines] == [(0, 0), (0, 1), (0, 2), (2, 2)]
    assert lines[2][2] == lines[3][2], "the epoch behind the checkpoint is not the one that was lost"
    assert "'epoch': 2" in done.stdout
