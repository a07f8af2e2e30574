"""The page on QLoRA is followed by copy and paste, and one process prints what two do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from dsx_testkit.pages import follow, same_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "end-to-end" / "qlora.md"
MISSING = [name for name in ("bitsandbytes", "peft", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: python3 tools/dev.py clients"),
]


def test_two_processes_print_what_the_page_says_and_one_prints_the_same(tmp_path):
    sys.path.insert(0, str(ROOT / "tools"))
    from pictures import prepare

    prepare(PAGE, tmp_path)
    printed = follow(PAGE, tmp_path)
    alone = tmp_path / "alone.md"
    alone.write_text("```sh\ndsx launch --quiet --num_procs 1 qlora.py\n```\n")
    (one,) = follow(alone, tmp_path)
    assert any(same_text(one, two) for two in printed), (one, printed)
