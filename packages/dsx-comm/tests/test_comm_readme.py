"""The README's example runs as it stands, alone and on two ranks."""

import re
from pathlib import Path

import dsx_comm
from dsx_testkit import run_ranks

README = Path(__file__).resolve().parents[1] / "README.md"


def example():
    code, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    return code


def run(rank, n, code):
    import os

    if n == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
    exec(code, {"__name__": "__main__"})


def test_the_example_runs_alone_and_on_two_ranks(capsys):
    run_ranks(run, 1, example(), backend=None)
    text = capsys.readouterr().out
    assert "'reduce_scatter_tensor': (1, 0)" in text and "Comm. Op" in text
    run_ranks(run, 2, example(), backend=None)
    text = capsys.readouterr().out
    assert text.count("'reduce_scatter_tensor': (1, 65536)") == 2  # 2^16 elements of 2 bytes, half of them sent
    assert text.count("Comm. Op") == 1


def test_the_example_of_symmetric_memory_runs_on_two_ranks():
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "dsx_comm.empty" in c]
    run_ranks(run, 2, code, backend=None)


def test_every_public_name_is_there_and_documented():
    for name in dsx_comm.__all__:
        value = getattr(dsx_comm, name)
        assert name in ("__version__", "ReduceOp") or value.__doc__, name
