"""Subcommands from entry points, and the end of a program of the command line."""

import sys
from importlib import metadata

import pytest
from dsx.commands import GROUP, Subcommand, installed_commands, run_command

TOOL = """\"\"\"`tool wash`: clean the dishes. It takes soap.\"\"\"
import sys
def main(argv, *, prog):
    sys.stdout.write(f"{prog} {argv}\\n")
    if argv == ["interrupt"]:
        raise KeyboardInterrupt
    return 3
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A program with one command, in a package that fails when it is imported for its help alone."""
    package = tmp_path / "washing_tool"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "wash.py").write_text(TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {"wash": Subcommand("wash", "washing_tool.wash:main")}
    for name in [name for name in sys.modules if name.startswith("washing_tool")]:
        del sys.modules[name]


def run(tool, *words):
    return run_command(tool, words, prog="tool", version="tool 1")


def test_the_help_imports_nothing(tool, capsys):
    assert run(tool, "--help") == 0
    assert "commands:\n  wash  clean the dishes\n" in capsys.readouterr().out
    assert "washing_tool" not in sys.modules


def test_a_command_gets_its_words_and_its_name(tool, capsys):
    assert run(tool, "wash", "a", "--b") == 3
    assert capsys.readouterr().out == "tool wash ['a', '--b']\n"


def test_ctrl_c_gives_130_and_no_traceback(tool, capsys):
    assert run(tool, "wash", "interrupt") == 130
    assert capsys.readouterr().err == "\n"


@pytest.mark.parametrize(("words", "code"), [((), 2), (("-V",), 0), (("wish",), 2), (("zzzzzz",), 2)])
def test_other_words(tool, words, code, capsys):
    assert run(tool, *words) == code
    said = capsys.readouterr()
    if words == ("wish",):
        assert said.err == "tool: unknown command 'wish'; did you mean 'tool wash'?\n"
    if words == ("zzzzzz",):
        assert said.err.endswith("see tool --help\n")
    if words == ("-V",):
        assert said.out == "tool 1\n"


def test_another_distribution_adds_a_command(tool, tmp_path, monkeypatch):
    info = tmp_path / "washing_tool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: washing-tool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nwash = washing_tool.wash:main\n")
    assert [one.value for one in metadata.entry_points(group=GROUP) if one.name == "wash"] == ["washing_tool.wash:main"]
    assert installed_commands()["wash"] == Subcommand("wash", "washing_tool.wash:main", "washing-tool")
