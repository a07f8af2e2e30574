"""A command whose reader ends first is quiet; a broken pipe of something else is an error."""

import os
import subprocess
import sys

import pytest
from dsx_core import end_with_reader

COMMAND = """
import sys
from dsx_core import end_with_reader
def command():
    for number in range({lines}):
        print("a line of text", number)
    return 3
sys.exit(end_with_reader(command))
"""


@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "on the way"])
def test_a_reader_that_has_ended(lines):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(lines=lines)], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_exit_code_is_kept_where_all_is_read():
    done = subprocess.run([sys.executable, "-c", COMMAND.format(lines=2)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "a line of text 0\na line of text 1\n")


def test_another_broken_pipe_is_raised(capsys):
    def command():
        print("said")
        read, write = os.pipe()
        os.close(read)
        try:
            os.write(write, b"x")
        finally:
            os.close(write)
        return 0

    with pytest.raises(BrokenPipeError):
        end_with_reader(command)
    assert capsys.readouterr().out == "said\n"
