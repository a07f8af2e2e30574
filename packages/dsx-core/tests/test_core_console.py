"""Programs of the command line: a reader that ends first, words that were meant, progress."""

import io
import os
import subprocess
import sys

import pytest
from dsx_core import CommandParser, end_with_reader
from dsx_core.progress import Progress

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


def test_the_parser_of_the_subcommand_names_what_was_meant(capsys):
    parser = CommandParser(prog="tool", version="tool 1")
    wash = parser.add_subparsers(required=True).add_parser("wash")
    wash.add_argument("--soap", choices=["green", "blue"])
    for words, said in (
        (["wash", "--soup", "a"], "usage: tool wash"),
        (["wash", "--soup", "a"], "--soup: use --soap"),
        (["wash", "--soap", "blu"], "did you mean blue?"),
        (["wach"], "did you mean wash?"),
    ):
        with pytest.raises(SystemExit) as end:
            parser.parse_args(words)
        assert end.value.code == 2 and said in capsys.readouterr().err


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_progress_of_bytes_is_shown_in_gigabytes():
    screen = Screen()
    with Progress(0, "verify", unit="bytes", stream=screen) as bar:
        bar.reach(1_500_000_000, 3_000_000_000)
    assert "verify [############............]  50% 1.50/3.00 GB" in screen.getvalue()
