"""Which accelerator this process has: the one that was set, else what `DS_ACCELERATOR` names, else what the machine
offers.

It is looked for at the first call and stays; a script that wants another one calls `set_accelerator` before.
"""

from __future__ import annotations

import os

import torch

from .base import Accelerator, AcceleratorError
from .cpu import CPUAccelerator
from .cuda import CUDAAccelerator

VARIABLE = "DS_ACCELERATOR"
_CLASSES: dict[str, type[Accelerator]] = {"cuda": CUDAAccelerator, "cpu": CPUAccelerator}


class _Chosen:
    """The process's accelerator, once it is known."""

    accelerator: Accelerator | None = None


_chosen = _Chosen()


def get_accelerator() -> Accelerator:
    """The accelerator of this process. Raises `AcceleratorError` when `DS_ACCELERATOR` names one that is not here."""
    if _chosen.accelerator is None:
        _chosen.accelerator = _find()
    return _chosen.accelerator


def set_accelerator(accel_obj: Accelerator | None) -> None:
    """Make `get_accelerator` return this one; None: look again at the next call. Raises `AcceleratorError`."""
    if accel_obj is not None and not isinstance(accel_obj, Accelerator):
        raise AcceleratorError(
            f"set_accelerator: got a {type(accel_obj).__name__}, expected an object of a class derived from"
            " dsx.accelerator.Accelerator"
        )
    _chosen.accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether it is one of the devices that dsx knows."""
    return get_accelerator().device_name() in _CLASSES


def _find() -> Accelerator:
    name = os.environ.get(VARIABLE, "")
    if not name:
        return CUDAAccelerator() if torch.cuda.is_available() else CPUAccelerator()
    if name not in _CLASSES:
        raise AcceleratorError(
            f"{VARIABLE}: got {name!r}, expected {' or '.join(_CLASSES)}; for another device derive a class from "
            "dsx.accelerator.Accelerator and call set_accelerator"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise AcceleratorError(
            f"{VARIABLE}: got 'cuda', but torch sees no CUDA device; unset the variable, or install a CUDA build of"
            " torch"
        )
    return _CLASSES[name]()
