"""Pages that are followed by copy and paste: their files are saved, their commands are run, in the order of the page.

A block with a title is a file. A block `sh` is commands, one a line. A block `text` right behind commands is what they
print, up to the last digit of a number with a point.

`follow` starts the commands as a reader does, or `warm`: those of dsx in processes forked from one that has imported
torch, which saves ten seconds of a processor for each process. Then the launcher itself is not run, what it starts is.
Left out: shells; a command is a program with its words.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from .ranks import RankError, run_ranks

__all__ = ["commands_of", "follow", "same_text", "save_files"]

_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.S | re.M)
_NUMBER = re.compile(r"(\d+\.\d+)")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def save_files(pages: Iterable[Path], folder: Path) -> None:
    """Save the files of pages; where two have the same name, the later page's stays."""
    for page in pages:
        for _, title, body in _BLOCK.findall(page.read_text()):
            if title:
                (folder / title).write_text(body)


def commands_of(page: Path) -> list[str]:
    """The commands of a page, each on one line."""
    return [
        line
        for tag, title, body in _BLOCK.findall(page.read_text())
        if tag == "sh" and not title
        for line in _lines(body)
    ]


def follow(
    page: Path,
    folder: Path,
    *,
    warm: bool = False,
    python: Path = Path(sys.executable),
    inherited: Mapping[str, str] = os.environ,
) -> list[str]:
    """Follow a page in a folder and return what each command printed. `python`, `inherited`: the interpreter and the
    environment of commands that are started as a reader does.

    Raises:
        AssertionError: a command failed, or printed something else than the page says.
    """
    started = _started(python, inherited)
    run = partial(_forked, started) if warm else started
    printed: list[str] = []
    behind = 0  # commands whose output a text block would show
    for tag, title, body in _BLOCK.findall(page.read_text()):
        if title:
            (folder / title).write_text(body)
        elif tag == "sh":
            printed += [run(line, folder) for line in _lines(body)]
            behind = len(_lines(body))
            continue
        elif tag == "text" and behind:
            got = "".join(printed[-behind:])
            assert same_text(got, body), f"{page.name} says\n{body}but the commands printed\n{got}"
        behind = 0
    return printed


def same_text(got: str, expected: str) -> bool:
    """Whether both are the same words; numbers with a point may differ by two in the last digit that is expected."""
    mine, theirs = (_NUMBER.split(" ".join(text.split())) for text in (got, expected))
    if mine[::2] != theirs[::2]:
        return False
    pairs = zip(mine[1::2], theirs[1::2])
    return all(abs(float(a) - float(b)) <= 2.5 * 10.0 ** -len(b.partition(".")[2]) for a, b in pairs)


def _lines(body: str) -> list[str]:
    found = body.replace("\\\n", " ").splitlines()
    return [line.strip() for line in found if line.strip() and not line.startswith("#")]


def _started(python: Path, inherited: Mapping[str, str]) -> Callable[[str, Path], str]:
    path = f"{python.parent}{os.pathsep}{inherited['PATH']}"
    environment = {**inherited, "PATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    def run(line: str, folder: Path) -> str:
        done = subprocess.run(
            shlex.split(line), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def _forked(started: Callable[[str, Path], str], line: str, folder: Path) -> str:
    program, *words = shlex.split(line)
    if program != "dsx":
        return started(line, folder)  # it may start processes of its own, which look for its file
    count, ranked = 1, words[0] == "launch"
    if ranked:
        script = next(at for at, word in enumerate(words) if word.endswith(".py"))
        count, words = int(words[words.index("--num_procs") + 1]), words[script:]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            run_ranks(_run, count, words, str(folder), ranked, backend=None, timeout=280)
    except RankError as error:
        raise AssertionError(f"{line}\n{said.getvalue()}{error}") from error
    return said.getvalue()


def _run(rank: int, world_size: int, words: list[str], folder: str, ranked: bool) -> None:
    """One process: a script as one of a launcher's (`ranked`), or a command of dsx."""
    os.chdir(folder)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # the logs; what fails is raised with its traceback
    code: object = 0
    try:
        if ranked:
            sys.argv = [words[0], f"--local_rank={rank}", *words[1:]]
            sys.path.insert(0, folder)
            runpy.run_path(words[0], run_name="__main__")
        else:
            from dsx.cli import main

            for name in _OF_A_RANK:
                os.environ.pop(name, None)
            code = main(words)
    except SystemExit as end:
        code = end.code
    if code not in (0, None):
        raise RuntimeError(f"dsx {' '.join(words)} ended with {code!r}")
