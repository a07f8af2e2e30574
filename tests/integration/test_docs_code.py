"""Code in the documents: every block says what it is, python runs as it stands, commands and their options exist.

The READMEs' python is run by the packages' own tests, so that it also runs where a package stands alone.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [*DOCS, ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
TAGS = {"python", "sh", "text", "json", "toml", "diff"}  # not mermaid: the site would show it as source
FENCE = re.compile(r"^ *```(\S*)[^\n]*\n(.*?)^ *```$", re.S | re.M)


def blocks(page: Path, tag: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text()) if found == tag]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is(page):
    assert {tag for tag, _ in FENCE.findall(page.read_text())} <= TAGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_code_fit_beside_the_navigation(page):
    """88 columns. Blocks of the kind `text` are what a program prints, or a drawing: they are scrolled."""
    code = (line for tag, body in FENCE.findall(page.read_text()) if tag != "text" for line in body.splitlines())
    assert [line for line in code if len(line) > 88] == []


# Run in other ways: one after the other as files (test_first_run_page.py, test_course.py), and to raise errors
# (test_error_codes.py).
ELSEWHERE = {ROOT / "docs" / "start" / "first-run.md", ROOT / "docs" / "reference" / "errors.md"}
ELSEWHERE |= {*ROOT.glob("docs/course/*.md"), *ROOT.glob("docs/end-to-end/*.md")}
CLIENTS = ("lightning", "ray")
PYTHON = [(page, number) for page in DOCS if page not in ELSEWHERE for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(
    ("page", "number"), PYTHON, ids=lambda item: item.name if isinstance(item, Path) else str(item)
)
def test_python_runs_as_it_stands(page, number, tmp_path):
    code = blocks(page, "python")[number]
    if "dsx_simcuda" in code and not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler for the simulated device")
    missing = [name for name in CLIENTS if f"import {name}\n" in code and importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: python3 tools/dev.py clients")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@functools.cache
def help_of(program: str) -> str:
    done = subprocess.run([*shlex.split(program), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{program} --help: {done.stderr}"
    return done.stdout


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Our commands of a page: the program with its subcommands, and the options before the user's script."""
    found = []
    for line in "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["dsx"]:
            program = [sys.executable, "-m", "dsx", words[1]]
            rest = words[2:4] if words[1] == "ssh" else words[2:]  # after its options comes a command of the user's
        elif words[:2] == ["python", "-m"] and words[2].startswith("dsx"):
            program, rest = [sys.executable, "-m", words[2]], words[3:]
        elif words[:1] == ["dsx-nvme"]:
            program, rest = [sys.executable, "-m", "dsx_nvme"], words[1:]
        elif words[:1] == ["python"] and words[1].startswith("packages/"):
            program, rest = [sys.executable, str(ROOT / words[1])], words[2:]
        else:
            continue
        ends = (at for at, word in enumerate(rest) if word.endswith(".py") or word == "--")
        script = next(ends, len(rest))
        options = [word.partition("=")[0] for word in rest[:script] if word.startswith("-")]
        if rest and re.fullmatch(r"[a-z]+", rest[0]) and program[-1] != "launch" and script == len(rest):
            program = [*program, rest[0]] if f"{rest[0]}" in help_of(shlex.join(program)) else program
        found.append((shlex.join(program), options))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page):
    for program, options in commands(page):
        text = help_of(program)
        assert [option for option in options if option not in text] == [], program
