"""The README's example of a 1-bit optimizer runs as it stands, alone and on two ranks."""

import re
from pathlib import Path

from dsx_testkit import run_ranks

README = Path(__file__).resolve().parents[1] / "README.md"


def example():
    return next(code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "OneBitAdam(" in code)


def run(rank, n, code):
    import os

    if n == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
    scope = {"__name__": "__main__"}
    exec(code, scope)
    return scope["loss"].item()


def test_the_example_learns_alone_and_on_two_ranks(capsys):
    assert run_ranks(run, 1, example(), backend=None)[0] < 15
    assert "step 100 (one_bit): sent 0 B" in capsys.readouterr().out
    losses = run_ranks(run, 2, example(), backend=None)
    text = capsys.readouterr().out
    assert max(losses) < 20 and text.count("step 100 (one_bit): sent") == 2 and "gain" not in text
