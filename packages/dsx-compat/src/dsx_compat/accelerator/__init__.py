"""One interface to the devices that a script trains on: `get_accelerator()` is CUDA if there is a CUDA device,
otherwise the CPU.

    from dsx_compat.accelerator import get_accelerator

    accelerator = get_accelerator()
    model.to(accelerator.current_device_name())
    accelerator.synchronize()
    print(accelerator.memory_allocated())

| file | what |
|---|---|
| `base` | `Accelerator`: the methods, and those that are the same everywhere |
| `cpu`, `cuda` | the two devices |
| `choice` | which one `get_accelerator()` returns: `set_accelerator`, `DS_ACCELERATOR`, or what the machine has |

The names are those that existing scripts use. A method that a device does not support raises `AcceleratorError` (graphs
on the CPU). Left out: other devices (xpu, npu, hpu, mlu, mps, ...); for these, derive a class from `Accelerator` and
give it to `set_accelerator`.
"""

from .base import Accelerator, AcceleratorError
from .choice import get_accelerator, is_current_accelerator_supported, set_accelerator
from .cpu import CPUAccelerator, HostEvent
from .cuda import CUDAAccelerator

__all__ = [
    "Accelerator",
    "AcceleratorError",
    "CPUAccelerator",
    "CUDAAccelerator",
    "HostEvent",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]
