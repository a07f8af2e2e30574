"""The README's example runs as it stands, on one and on two ranks, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dsx_testkit import run_ranks

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def example(rank, world, code):
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    losses = scope["losses"]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10]), losses[::10]
    return losses[-1]


@pytest.mark.parametrize("world", [1, 2])
def test_example(world):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    run_ranks(example, world, code)
