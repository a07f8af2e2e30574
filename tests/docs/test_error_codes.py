"""Codes of errors and warnings: the sources and the page agree, and each example on the page gives what the page says.

A code means one thing, so that it stands in one source file and has one section. An example is run as a reader runs it:
in processes of its own, two of them where its block is headed "two processes". What a warning writes to stderr is
compared, so that one which no user would see fails.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import dsx.wiring  # noqa: F401 - both for the ranks, which are forked with what this process has imported
import pytest
import torch
from dsx_testkit import RankError, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "errors.md"
LOADER = ROOT / "tools" / "native" / "loader.py"  # the build puts a copy into each package with native code
SOURCES = [file for file in ROOT.glob("packages/*/src/**/*.py") if file.name != "_native_loader.py"]
SOURCES += [ROOT / "tools" / "dsx_build.py", LOADER]
SECTION = re.compile(r"^### (DSX\d{3})\n(.*?)(?=^##|\Z)", re.S | re.M)
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.S | re.M)

# What cannot be raised on a machine that runs the tests has its test elsewhere.
TESTED_ELSEWHERE = {
    "DSX602": ROOT / "packages" / "dsx-ops" / "tests" / "test_ops_build.py",
    "DSX903": ROOT / "packages" / "dsx-simcuda" / "tests" / "test_simcuda_refusals.py",
}
# A rank that ends before the others: `run_ranks` would end them all, so that none could say so.
LAUNCHED = {"DSX206"}
WHO_I_AM = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


def sections() -> list[tuple[str, str]]:
    return SECTION.findall(PAGE.read_text())


def codes_by_file() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in SOURCES:
        for code in sorted(set(re.findall(r"\bDSX\d{3}\b", file.read_text()))):
            found.setdefault(code, []).append(file)
    return found


def test_a_code_stands_in_one_source_file():
    assert {code: files for code, files in codes_by_file().items() if len(files) > 1} == {}


def test_sources_and_page_have_the_same_codes():
    on_page = [code for code, _ in sections()]
    assert len(on_page) == len(set(on_page))
    assert sorted(on_page) == sorted(codes_by_file())
    assert on_page == sorted(on_page), "in order, so that a reader finds one"


@pytest.mark.parametrize("code", [code for code, _ in sections()])
def test_every_section_is_whole(code):
    text = dict(sections())[code]
    kinds = [kind for kind, _, _ in BLOCK.findall(text)]
    assert text.strip().startswith("**"), "what has happened"
    assert len(kinds) == 2 and kinds[0] in ("python", "sh") and kinds[1] == "text", "an example and its message"
    assert "\n*Why:* " in text and "\n*Do:* " in text


def is_warning(code: str) -> bool:
    """A code is DSX, the subject, and two digits, of which the first is 5 for a warning."""
    return code[4] == "5"


def run_example(rank, world_size, source, alone):
    """Run an example; returns what it has written to stderr."""
    if alone:
        for name in WHO_I_AM:
            os.environ.pop(name, None)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def raised_by(source: str, processes: int) -> str:
    with pytest.raises(RankError) as caught:
        run_ranks(run_example, processes, source, processes == 1, backend=None)
    return "\n".join(failure.text for failure in caught.value.failures)


def warned_by(source: str, processes: int) -> str:
    return "\n".join(run_ranks(run_example, processes, source, processes == 1, backend=None))


def said_by(command: str, *, fails: bool) -> str:
    words = command.split()
    assert words[0] == "dsx"
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("code", [code for code, _ in sections() if code not in TESTED_ELSEWHERE])
def test_the_example_gives_it(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (kind, title, source), (_, _, message) = BLOCK.findall(dict(sections())[code])
    if code in LAUNCHED:
        Path("example.py").write_text(source)
        text = said_by("dsx launch --num_procs 2 example.py", fails=True)
    elif kind == "python":
        run = warned_by if is_warning(code) else raised_by
        text = run(source, 2 if title == "two processes" else 1)
    else:
        if "--num_gpus" in source and torch.cuda.is_available():
            pytest.skip("this machine has devices")
        if "--launcher ssh" in source and shutil.which("ssh") is None:
            pytest.skip("no ssh on this machine (Debian: apt-get install openssh-client)")
        Path("hosts").write_text("nowhere.invalid slots=1\n")
        Path("train.py").touch()
        text = said_by(source, fails=not is_warning(code))
    assert f"[{code}]" in text
    assert "docs: dsx explain " in text
    assert message.strip() in text


@pytest.mark.parametrize("code", TESTED_ELSEWHERE)
def test_what_is_tested_elsewhere_is(code):
    assert f"[{code}]" in TESTED_ELSEWHERE[code].read_text()
