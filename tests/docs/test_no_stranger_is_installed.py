"""No text tells a reader to install a package of ours from an index: the name `dsx` there is another project's, and
those of the parts are free for anybody to take. Commands name paths of a checkout, with all siblings that pip would
otherwise look for in an index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages, closure  # noqa: E402

PACKAGES = all_packages()
TEXTS = {".md", ".py", ".toml", ".sh", ".yml", ".yaml", ".json", ".cpp", ".h", ".cu", ".cuh", ".js", ".html", ".txt"}
# An f-string or a format fills in a name: third-party ones here, and the developers' own environment.
FILLED_IN = {"packages/dsx-monitor/src/dsx_monitor/errors.py": "{package}", "tools/devenv.py": "{"}
COMMAND = re.compile(r"\b(?:(?:pip3?|pipx|uv pip) (?:install|wheel|download)|(?:uv|poetry|pdm|rye) add)\b(.*)")
OURS = re.compile(r"(?:dsx|dsx[-_][\w-]+|dsx\[.*)(?:\[[\w,]*\]|[=<>~!@;].*)*")


def tracked() -> list[Path]:
    """Files of the repository that hold text; without git (an unpacked copy) all that are not made by tools."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        names = done.stdout.splitlines()
    else:
        names = [p.relative_to(ROOT).as_posix() for top in ("packages", "docs", "tools", "tests", "ci")
                 for p in (ROOT / top).rglob("*") if p.is_file()]  # fmt: skip
    return [ROOT / name for name in names if Path(name).suffix in TEXTS and (ROOT / name).is_file()]


def commands(text: str) -> list[list[str]]:
    """The words after each command that installs, with lines that go on, and texts of Python that are joined."""
    joined = re.sub(r"\\\n\s*|(?<=\S)\"\n\s*f?\"(?= )|(?<= )\"\n\s*f?\"", " ", text)
    joined = re.sub(r"(`pip (?:install|wheel))\n", r"\1 ", joined)
    found = []
    for rest in COMMAND.findall(joined):
        command = re.split(r"[`#&|;]|\s\(|, |\\n|\s(?:in|and|or|then|again|from|if)\s", rest, maxsplit=1)[0]
        found.append([word.strip("'\",);:").rstrip(".") for word in command.split()])
    return found


def mistakes(text: str, filled_in: str = "") -> list[str]:
    """Commands that would ask an index for a package of ours."""
    found = []
    for words in commands(text):
        line = " ".join(words)
        if "--no-index" in words:
            continue
        found += [f"asks an index for {word}: {line}" for word in words if OURS.fullmatch(word)]
        found += [f"a name is filled in: {line}" for word in words if word.startswith("{") and word != filled_in]
        named = {m[1] for word in words if (m := re.match(r"\./packages/(dsx[\w-]*)", word))} & set(PACKAGES)
        needed = {member for name in named for member in closure(name, PACKAGES)}
        if needed - named and "--no-deps" not in words:
            found.append(f"pip would look for {sorted(needed - named)} in an index: {line}")
    return found


def test_no_text_asks_an_index_for_a_package_of_ours():
    files = [file for file in tracked() if file != Path(__file__).resolve()]
    assert len(files) > 1000
    found = {}
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        if wrong := mistakes(file.read_text(), FILLED_IN.get(name, "")):
            found[name] = wrong
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install dsx",
        "`pip install dsx-zero`",
        "run `pip install\n--force-reinstall dsx-nvme`.",
        "pip install 'dsx[all]'",
        "pip install dsx-monitor[wandb]",
        "pip install dsx==0.1.0",
        "python -m pip install -U torch dsx_comm",
        "uv add dsx-moe",
        'f"not installed: pip install {name}=={wanted}"',
        'HINT = "reinstall: pip install --no-cache-dir"\n    " dsx-ops"',
        "pip install torch \\\n    dsx-pipe",
        "pip install ./packages/dsx-comm",
        "pip install ./packages/dsx ./packages/dsx-comm",
    ],
)
def test_such_a_text_is_found(text):
    assert mistakes(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install ./packages/dsx-core ./packages/dsx-comm",
        "pip install --no-deps ./packages/dsx-comm",
        "pip install --no-index --find-links wheels dsx",
        "pip install './packages/dsx-sparse-attn[triton]'",
        "pip install torch  # then dsx",
        "pip uninstall -y dsx-compat",
        'f"pip install --no-deps ./packages/{distribution}"',
    ],
)
def test_a_text_that_names_paths_passes(text):
    assert mistakes(text) == []


def test_siblings_are_asked_for_in_exactly_one_version():
    """A range would let pip resolve sets that `dsx.initialize` refuses."""
    for package in PACKAGES.values():
        text = (package.path / "pyproject.toml").read_text()
        for name, extras, bound in re.findall(r'"(dsx[a-z-]*)(\[[\w,]+\])?([^"\w\[/.:][^"]*)?"', text):
            if name not in PACKAGES or name == package.name:
                continue
            assert bound == f"=={PACKAGES[name].version}", f"{package.name} asks for {name}{extras}{bound}"
