"""The README's examples run as printed, alone and on two ranks; the first learns."""

import re
from pathlib import Path

from dsx_testkit import run_ranks

README = Path(__file__).parent.parent / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def example() -> str:
    return examples()[0]


def run_as_printed(rank, world, code, folder):
    import os

    os.chdir(folder)
    exec(compile(code, "README.md", "exec"), {})


def run(rank, world, code, folder):
    import os

    os.chdir(folder)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    engine = names["engine"]
    assert engine.global_samples == 4 * 512 and (Path(folder) / "ckpt" / "latest").exists()
    return engine.last_step.loss


def test_the_example_is_short():
    assert len([line for line in example().splitlines() if line.strip()]) <= 28


def test_the_example_learns(tmp_path):
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        assert max(run_ranks(run, world, example(), str(folder))) < 0.5


def test_the_other_examples_run(tmp_path):
    for number, code in enumerate(examples()[1:]):
        for world in (1, 2):
            folder = tmp_path / f"{number}-{world}"
            folder.mkdir()
            run_ranks(run_as_printed, world, code, str(folder))
