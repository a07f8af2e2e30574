"""Which files name `torch.cuda`: those that need more than a device in general, each with its reason.

Streams, events, memory and random state of a device are asked of `dsx_core.device.Device`, for every accelerator. A
file that names `torch.cuda` has to stand in the table, and every entry has to be true. dsx-simcuda is left out: it is
`torch.cuda` on a CPU.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages  # noqa: E402

ALLOWED = {
    "dsx": {"utils/ranges.py": "NVTX ranges, which profilers of NVIDIA read"},
    "dsx-activations": {"attention/fused.py": "asks whether the flash kernels run on a device"},
    "dsx-checkpoint": {},
    "dsx-comm": {
        "groups.py": "asks for NCCL, which carries tensors of CUDA devices",
        "init.py": "asks for NCCL, which carries tensors of CUDA devices",
        "lanes.py": "the lane of a CUDA device, which tests record and break by these names",
        "step_lane.py": "steps on a CUDA stream between collectives of NCCL",
    },
    "dsx-compat": {
        "accelerator/choice.py": "DeepSpeed's accelerator for CUDA, by its name",
        "accelerator/cuda.py": "DeepSpeed's accelerator for CUDA, by its name",
    },
    "dsx-compress": {},
    "dsx-core": {},
    "dsx-data": {},
    "dsx-launch": {"devices.py": "counts the devices that CUDA_VISIBLE_DEVICES names"},
    "dsx-moe": {},
    "dsx-monitor": {},
    "dsx-nvme": {"memory.py": "page-locks memory that the package has allocated itself: cudaHostRegister"},
    "dsx-ops": {"cuda/launch.py": "starts kernels"},
    "dsx-pipe": {},
    "dsx-plan": {"trials.py": "limits the memory of a process, which torch can do for CUDA only"},
    "dsx-sparse-attn": {
        "backends/triton_gpu.py": "starts kernels",
        "masks.py": "looks for a capture; this package needs torch and no other package",
    },
    "dsx-verify": {"command.py": "asks for NCCL, which carries tensors of CUDA devices"},
    "dsx-zero": {
        "homes/pinned.py": "page-locks memory that the package has allocated itself: cudaHostRegister",
        "params/init.py": "asks for NCCL, which carries tensors of CUDA devices",
    },
}


def names_cuda(text: str) -> bool:
    """Whether the code, not its comments and texts, names `torch.cuda`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch":
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and any(n.name == "cuda" for n in node.names):
            return True
        if isinstance(node, ast.Import) and any(name.name.startswith("torch.cuda") for name in node.names):
            return True
    return False


def test_every_package_stands_in_the_table():
    assert set(ALLOWED) == set(all_packages()) - {"dsx-simcuda"}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_names_cuda_only_where_the_table_says(package):
    source = ROOT / "packages" / package / "src" / package.replace("-", "_")
    files = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py")}
    assert len(files) > 5
    found = {name for name, path in files.items() if names_cuda(path.read_text(encoding="utf-8"))}
    assert found == set(ALLOWED[package])


@pytest.mark.parametrize(
    "text", ["import torch\ntorch.cuda.synchronize()", "from torch.cuda import Event", "from torch import cuda"]
)
def test_every_way_to_name_it_is_found(text):
    assert names_cuda(text) and not names_cuda('"torch.cuda"  # torch.cuda\nimport torch\ntorch.accelerator')
