"""The README's example runs as printed, alone and on two ranks, and learns."""

import re
from pathlib import Path

from dsx_testkit import run_ranks

README = Path(__file__).parent.parent / "README.md"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    return code


def run(rank, world, code, folder):
    import os

    os.chdir(folder)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    engine = names["engine"]
    assert engine.global_samples == 4 * 512 and (Path(folder) / "ckpt" / "latest").exists()
    return engine.last_step.loss


def test_the_example_is_short():
    assert len([line for line in example().splitlines() if line.strip()]) <= 24


def test_the_example_learns(tmp_path):
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        assert max(run_ranks(run, world, example(), str(folder))) < 0.5
