"""`deepspeed.tp_model_init`: tensor slicing that a program asks for before `deepspeed.initialize`.

DeepSpeed only records the arguments, and slices the model in `initialize`, as its section `tensor_parallel` says. So
does dsx. The record belongs to the model, and is dropped with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import dsx_comm
import torch
from dsx.config.source import Document, read
from dsx.engine.errors import EngineArgumentError
from dsx.errors import DsxConfigError
from torch import nn

from .errors import NotSupportedError

__all__ = ["set_autotp_mode", "tp_model_init", "with_recorded_slices"]

_MODES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class _Slices:
    """Arguments of one call of `tp_model_init`."""

    size: int
    dtype: torch.dtype | None
    group: Any


_RECORDED: WeakKeyDictionary[nn.Module, _Slices] = WeakKeyDictionary()


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, *, tp_group: Any = None
) -> nn.Module:
    """Ask for a model to be sliced over `tp_size` ranks by `deepspeed.initialize`. Nothing is sliced before.

    Args:
        model: the module that `initialize` will be given, or a part of it.
        tp_size: number of ranks that share one copy of the model.
        dtype: that of the precision mode in the configuration; it is compared with it.
        config: the configuration; its `tensor_parallel.autotp_size` is compared with `tp_size`.
        tp_group: the process group that shares the model; None: that of the mpu, or `tp_size` neighbouring ranks.

    Returns:
        The model itself.

    Raises:
        EngineArgumentError: `tp_size` is not positive, or contradicts `config`.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise EngineArgumentError(f"tp_model_init(tp_size=...): got {tp_size!r}, expected a whole number of at least 1")
    section = config.get("tensor_parallel") if isinstance(config, Mapping) else None
    written = section.get("autotp_size") if isinstance(section, Mapping) else None
    if written not in (None, "auto", tp_size):
        raise _contradiction(written, tp_size)
    _RECORDED[model] = _Slices(tp_size, dtype, tp_group)
    return model


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing for training, the only mode of dsx.

    Raises:
        NotSupportedError: `training` is False, which DeepSpeed takes as the mode of its inference engine.
    """
    if not training:
        raise NotSupportedError(
            "deepspeed.set_autotp_mode(training=False): dsx has no inference engine; pass training=True, or serve the"
            " saved weights with an engine such as vLLM",
            name="deepspeed.set_autotp_mode",
        )


def with_recorded_slices(source: Any, model: Any, mpu: Any) -> tuple[Any, Any]:
    """The configuration and the mpu, completed by what `tp_model_init` has recorded for the model or a part of it.

    Args:
        source: a configuration as `dsx.initialize` takes it; not changed.
        model: the model to build an engine around.
        mpu: the given mpu, or None.

    Raises:
        EngineArgumentError: the record contradicts the configuration or the mpu.
    """
    parts = model.modules() if isinstance(model, nn.Module) else ()
    found = next((_RECORDED[part] for part in parts if part in _RECORDED), None)
    if found is None:
        return source, mpu
    try:
        document = read(source)
    except DsxConfigError:
        return source, mpu  # dsx.initialize says what is wrong
    _check_dtype(document, found)
    section = document.data.get("tensor_parallel")
    section = dict(section) if isinstance(section, dict) else {}
    written = section.get("autotp_size")
    if written not in (None, "auto", 0, found.size):
        raise _contradiction(written, found.size)
    section["autotp_size"] = found.size
    document.data["tensor_parallel"] = section
    if found.group is not None and found.size > 1:
        _check_group(found, mpu)
    return document, mpu


def _check_dtype(document: Document, found: _Slices) -> None:
    sections = {mode: document.data.get(mode) for mode in _MODES}
    on = [mode for mode, section in sections.items() if isinstance(section, dict) and section.get("enabled") is True]
    expected = _MODES[on[0]] if on else torch.float32
    autocast = document.data.get("torch_autocast")
    if found.dtype in (None, expected) or (isinstance(autocast, dict) and autocast.get("enabled") is True):
        return
    raise EngineArgumentError(
        f"tp_model_init(dtype=...): got {found.dtype}, expected {expected}, the parameters' dtype by the configuration;"
        ' write "bf16": {"enabled": true} or "fp16": {"enabled": true}, or leave dtype out'
    )


def _check_group(found: _Slices, mpu: Any) -> None:
    """The group has to be that of the mpu, or the one that the configuration makes: neighbouring ranks."""
    ranks = list(dsx_comm.get_all_ranks_from_group(found.group))
    if mpu is not None:
        expected = list(dsx_comm.get_all_ranks_from_group(mpu.get_model_parallel_group()))
    else:
        first = dsx_comm.get_rank() // found.size * found.size
        expected = list(range(first, first + found.size))
    if ranks != expected:
        raise EngineArgumentError(
            f"tp_model_init(tp_group=...): got the ranks {ranks}, expected {expected}; pass an mpu with these groups to"
            " deepspeed.initialize"
        )


def _contradiction(written: Any, size: int) -> EngineArgumentError:
    return EngineArgumentError(
        f"tp_model_init(tp_size=...): got {size}, expected {written} as tensor_parallel.autotp_size of the"
        " configuration says; make them equal"
    )
