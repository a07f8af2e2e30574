"""A program whose last asynchronous save failed does not end with exit code 0, whether or not it calls `destroy`."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import atexit, os, sys, threading
    atexit.register(lambda: print("an older function ran", flush=True))
    import torch, dsx
    from dsx.checkpoint import CheckpointError
    from dsx_checkpoint.failures import Failures

    folder, ending = sys.argv[1:]
    engine = dsx.initialize(model=torch.nn.Linear(5, 3), config={"train_batch_size": 1, "steps_per_print": None})[0]
    engine.save_checkpoint(folder, tag="old")
    write = os.pwrite

    def failing(fd, data, offset):
        if threading.current_thread().name.startswith("dsx-checkpoint") and ending != "good":
            raise OSError(28, "No space left on device")
        return write(fd, data, offset)

    failed, keep = threading.Event(), Failures.add
    Failures.add = lambda *given: (keep(*given), failed.set())
    os.pwrite = failing
    engine.save_checkpoint(folder, tag="new", asynchronous=True)
    print("the last line", end="")
    if ending.isdecimal():
        while not failed.is_set():
            failed.wait(1)
    if ending == "caught":
        try:
            engine.wait_for_checkpoints()
        except CheckpointError:
            pass
    elif ending == "dropped":
        del engine
    elif ending.isdecimal():
        sys.exit(int(ending))
    elif ending.startswith("SystemExit"):
        failed.wait(30)
        raise SystemExit(int(ending.split()[1]))
    elif ending == "error":
        failed.wait(30)
        raise RuntimeError("an error of the program")
    elif ending == "in a thread":
        thread = threading.Thread(target=lambda: sys.exit(9))
        failed.wait(30)
        thread.start()
        thread.join()
"""


def run(tmp_path, ending):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "ckpt"), ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "an older function ran" in done.stdout and "the last line" in done.stdout
    return done.returncode, done.stderr, sorted(path.name for path in (tmp_path / "ckpt").iterdir())


@pytest.mark.parametrize("ending", ["nothing", "dropped", "256", "in a thread"])
def test_a_failure_that_no_call_raises_ends_the_process_with_a_code(tmp_path, ending):
    code, said, left = run(tmp_path, ending)
    assert code == 1 and left == ["latest", "old"]
    assert "ckpt/new was not written" in said and "No space left on device" in said and "exit code 1" in said


@pytest.mark.parametrize(("ending", "code"), [("75", 75), ("SystemExit 76", 76), ("error", 1)])
def test_the_code_that_the_program_asks_for_is_kept(tmp_path, ending, code):
    got, said, left = run(tmp_path, ending)
    assert got == code and left == ["latest", "old"]
    assert "ckpt/new was not written" in said and "exit code 1, or with the one that the program asked for" in said


@pytest.mark.parametrize("ending", ["caught", "good"])
def test_a_failure_that_was_raised_or_none_leaves_the_code_alone(tmp_path, ending):
    code, said, left = run(tmp_path, ending)
    assert code == 0, said
    assert "was not written" not in said and left == (
        ["latest", "new", "old"] if ending == "good" else ["latest", "old"]
    )
