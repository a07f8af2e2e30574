"""Which versions, devices and tools are here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

import torch
from records import record


def first_lines(*command: str) -> str:
    """What a tool says about itself; empty where it is missing."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return (done.stdout or done.stderr).strip()


def main() -> int:
    """Exit code 3: no CUDA device."""
    record("python", "noted", f"{sys.version.split()[0]} at {sys.executable}, {platform.platform()}")
    record("cores", "noted", f"{os.cpu_count()}")
    record("torch", "noted", f"{torch.__version__} at {os.path.dirname(torch.__file__)}, CUDA {torch.version.cuda}")
    for name, command in {
        "driver": ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "nvcc": ("nvcc", "--version"),
        "compute-sanitizer": ("compute-sanitizer", "--version"),
        "C++ compiler": (os.environ.get("CXX", "g++"), "--version"),
    }.items():
        said = first_lines(*command)
        record(name, "noted" if said else "skipped", said or f"{command[0]} is not on PATH")
    if not torch.cuda.is_available():
        record("device", "bad", "torch sees no CUDA device")
        return 3
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        record(f"device {number}", "good", found.name, bytes=found.total_memory)
    values = torch.arange(1000, device="cuda", dtype=torch.float64)
    right = values.sum().item() == 499500.0
    record("one sum on the device", "good" if right else "bad", "" if right else f"{values.sum().item()}, not 499500")
    try:
        from torch.cuda import nccl

        record("nccl", "noted", str(nccl.version()))
    except Exception as error:  # noqa: BLE001  a version that cannot be read is no reason to stop
        record("nccl", "skipped", f"its version cannot be read: {error}")
    from importlib.metadata import distributions

    ours = sorted(f"{d.metadata['Name']} {d.version}" for d in distributions() if d.metadata["Name"].startswith("dsx"))
    record("dsx", "noted", ", ".join(ours))
    return 0


if __name__ == "__main__":
    sys.exit(main())
