"""Private names of torch stand in one file of each package that is done: a release of torch is checked at one place.

Attributes of modules and parameters (`module._parameters`) are not seen here: only names below `torch` itself.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {"dsx-zero": "torch_names.py"}
"""For each package that is done, the one file."""


def private_names(text: str) -> set[str]:
    """The private names below `torch` that a module's code uses or imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            name = _dotted(node)
            if name.startswith("torch.") and _is_private(name):
                found.add(name)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{n.name}" for n in node.names if _is_private(f"{node.module}.{n.name}")}
        elif isinstance(node, ast.Import):
            found |= {n.name for n in node.names if n.name.startswith("torch.") and _is_private(n.name)}
    return found


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of names alone; an empty text for everything else."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("package", sorted(FILES))
def test_private_names_stand_in_one_file(package):
    source = ROOT / "packages" / package / "src" / package.replace("-", "_")
    files = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py")}
    found = {name: private_names(path.read_text(encoding="utf-8")) for name, path in files.items()}
    assert {name: names for name, names in found.items() if names and name != FILES[package]} == {}
    assert found[FILES[package]]


@pytest.mark.parametrize(
    "text",
    ["torch._C._nn", "from torch.utils._pytree import tree_map", "from torch.optim.optimizer import _hooks",
     "import torch._dynamo"],
)  # fmt: skip
def test_every_way_to_use_one_is_found(text):
    assert private_names(text) and not private_names("torch.nn.Module.__call__; module._parameters; from . import _x")
