"""Our packages import each other by import statements, which the linter of layers and a type checker see.

An import by string hides an arrow: planner and wiring were a circle in this way. Two places are named below, where a
table of names is what is wanted. A package may load its own modules lazily. dsx-compat finds the objects behind
DeepSpeed's names by a table too (`names.py`): it lies above all packages, and hides no arrow.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages  # noqa: E402

OURS = {package.module for package in all_packages().values()}
PLACES = {
    "dsx/wiring.py": "`part` imports a sibling, or says that it is missing or has another version",
    "dsx/cli.py": "the table of sub-commands, each imported when it is called",
}


def imported_by_string(text: str, own: str) -> Iterator[tuple[int, str]]:
    """(line, what is imported) of every import by string of another package of ours."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            for top in _tops(node.args[0]):
                if top in OURS - {own}:
                    yield node.lineno, top


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _tops(argument: ast.expr) -> list[str]:
    """First parts of the names that stand in an argument, also inside an f-string or a choice."""
    texts = [n.value for n in ast.walk(argument) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [text.partition(".")[0] for text in texts]


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
    found = sorted(top for _, top in imported_by_string(text, "dsx_own"))
    assert found == ["dsx", "dsx_nvme", "dsx_ops", "dsx_pipe", "dsx_zero"]
