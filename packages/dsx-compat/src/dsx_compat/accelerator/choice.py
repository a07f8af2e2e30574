"""Chooses the accelerator of this process: the one that was set, otherwise the one that `DS_ACCELERATOR` names,
otherwise what the machine has.

It is chosen at the first call and then kept. To use another one, call `set_accelerator` before.
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
    """The accelerator of the process, after it was chosen."""

    accelerator: Accelerator | None = None


_chosen = _Chosen()


def get_accelerator() -> Accelerator:
    """The accelerator of this process. Raises `AcceleratorError` if `DS_ACCELERATOR` names one that is not
    available.
    """
    if _chosen.accelerator is None:
        _chosen.accelerator = _find()
    return _chosen.accelerator


def set_accelerator(accel_obj: Accelerator | None) -> None:
    """Make `get_accelerator` return this object; None: choose again at the next call. Raises `AcceleratorError`."""
    if accel_obj is not None and not isinstance(accel_obj, Accelerator):
        raise AcceleratorError(
            f"set_accelerator: got a {type(accel_obj).__name__}, expected an object of a class derived from"
            " dsx_compat.accelerator.Accelerator"
        )
    _chosen.accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether the current accelerator is one that dsx supports."""
    return get_accelerator().device_name() in _CLASSES


def _find() -> Accelerator:
    name = os.environ.get(VARIABLE, "")
    if not name:
        return CUDAAccelerator() if torch.cuda.is_available() else CPUAccelerator()
    if name not in _CLASSES:
        raise AcceleratorError(
            f"{VARIABLE}: got {name!r}, expected {' or '.join(_CLASSES)}; for another device derive a class from "
            "dsx_compat.accelerator.Accelerator and call set_accelerator"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise AcceleratorError(
            f"{VARIABLE}: got 'cuda', but torch sees no CUDA device; unset the variable, or install a CUDA build of"
            " torch"
        )
    return _CLASSES[name]()
