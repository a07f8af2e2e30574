"""Our packages import each other by import statements, which the linter of layers and a type checker see.

An import by string hides an arrow: planner and wiring were a circle in this way. Three places are named below, where
a table of names is what is wanted. A package may load its own modules lazily. dsx-compat finds the objects behind
DeepSpeed's names by a table too (`names.py`): it lies above all packages, and hides no arrow.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages  # noqa: E402

OURS = {package.module for package in all_packages().values()}
PLACES = {
    "dsx/commands.py": "subcommands are entry points, each imported when it is called; no package is named here",
    "dsx/deepspeed_names.py": "the table of DeepSpeed's names, found in dsx-compat, above dsx, where it is installed",
    "dsx_compat/op_builder/__init__.py": "DeepSpeed's builders are found by name, in the top layer: no arrow is hidden",
}


def imported_by_string(text: str, own: str) -> Iterator[tuple[int, str]]:
    """(line, what is imported) of every import by string of another package of ours.

    Where a module imports what a variable names, every dotted name of one of our packages in it counts.
    """
    tree = ast.parse(text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _name(n.func) in ("import_module", "__import__")]
    arguments = [call.args[0] for call in calls if call.args]
    if any(not _tops(argument) and "__name__" not in ast.unparse(argument) for argument in arguments):
        arguments.append(tree)
    for argument in arguments:
        for line, top, dotted in _names(argument):
            if top in OURS - {own} and (dotted or argument is not tree):
                yield line, top


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names(tree: ast.AST) -> list[tuple[int, str, bool]]:
    """Line, first part, and whether there are more, of texts that look like names of modules, also in f-strings."""
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    parts = [(n.lineno, n.value) for n in texts if re.fullmatch(r"\w+(\.\w*)*", n.value)]
    return [(line, text.partition(".")[0], "." in text) for line, text in parts]


def _tops(argument: ast.expr) -> list[str]:
    return [top for _, top, _ in _names(argument)]


def test_no_package_of_ours_is_imported_by_string():
    found = []
    for package in all_packages().values():
        source = package.path / "src"
        for path in sorted(source.rglob("*.py")):
            place = path.relative_to(source).as_posix()
            if place not in PLACES:
                found += [f"{place}:{line} {top}" for line, top in imported_by_string(path.read_text(), package.module)]
    assert found == [], "write an import statement, inside the function if it must be late"


def test_the_named_places_exist():
    sources = [package.path / "src" for package in all_packages().values()]
    assert [place for place in PLACES if not any((source / place).is_file() for source in sources)] == []


def test_the_search_sees_each_way_to_write_it():
    text = """
import importlib
from importlib import import_module
importlib.import_module("dsx.planning").plan()
import_module("dsx_nvme" if late else "dsx_ops.x")
__import__("dsx_zero")
importlib.import_module(f"dsx_pipe.{name}")
importlib.import_module("torch._utils"), importlib.import_module(f"{__name__}.late")
importlib.import_module("dsx_own.late")
"""
    assert [top for _, top in imported_by_string('for n in ("dsx.engine", "a.b"): import_module(n)', "dsx_launch")] == [
        "dsx"
    ]
    found = sorted(top for _, top in imported_by_string(text, "dsx_own"))
    assert found == ["dsx", "dsx_nvme", "dsx_ops", "dsx_pipe", "dsx_zero"]
