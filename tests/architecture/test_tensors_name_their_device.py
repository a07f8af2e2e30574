"""Tensors that the library makes name their device, so that `torch.set_default_device` does not move them.

Messages, tables and plans in host memory were made on the default device: no program that sets one could train
(`tests/device/test_device_starts.py`). Parameters and buffers of layers are another matter: a user's default is meant
for them, so that packages of layers and kernels are left out.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages  # noqa: E402

MAKE = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "randperm", "linspace", "eye",
        "empty_strided", "scalar_tensor"}  # fmt: skip
LAYERS = {"dsx-moe/src/dsx_moe/gate.py", "dsx-pipe/src/dsx_pipe/models.py"}
LEFT_OUT = {"dsx-compat", "dsx-compress", "dsx-ops", "dsx-plan", "dsx-simcuda", "dsx-sparse-attn", "dsx-verify"}


def unnamed(source: str) -> list[int]:
    """Lines that call torch for a tensor and leave its device open."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in MAKE
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if not any(keyword.arg in ("device", "out", None) for keyword in call.keywords)
    ]


@pytest.mark.parametrize("package", sorted(all_packages().keys() - LEFT_OUT))
def test_tensors_name_their_device(package):
    folder = all_packages()[package].path
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((folder / "src").rglob("*.py"))
        if str(file.relative_to(folder.parent)) not in LAYERS
        for line in unnamed(file.read_text())
    ]
    assert found == [], "give device=: 'cpu' for host memory"


def test_an_open_device_is_found():
    assert unnamed("import torch\na = torch.zeros(3)\nb = torch.zeros(3, device='cpu')\n") == [2]
