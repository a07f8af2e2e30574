"""Puts the simulated group where torch looks for `nccl`."""

from __future__ import annotations

import importlib
import importlib.util
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from . import flight
from . import native as loaded
from .building import GROUP

VERSION = (2, 28, 9)


def _load() -> Any:
    folder = loaded.folder
    if folder is None:
        raise RuntimeError("the native library is not loaded")
    spec = importlib.util.spec_from_file_location("_dsx_simnccl", str(folder / GROUP))
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{folder / GROUP} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Options:
    """The options of ProcessGroupNCCL that matter here, and any others that a program sets."""

    backend = "nccl"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config: Any = type("Config", (), {})()
        self._timeout = c10d.default_pg_timeout


def _gloo(store: Any, rank: int, size: int, timeout: Any = c10d.default_pg_timeout) -> Any:
    """The backend that carries the bytes."""
    return c10d.ProcessGroupGloo(c10d.PrefixStore("simcuda", store), rank, size, timeout=timeout)


def _let_options_be_copied(kind: Any) -> None:
    """split_group() makes a deep copy of a group's options, which the compiled class cannot do."""

    def deepcopy(self: Any, memo: Any) -> Any:
        return kind(self.backend, self._timeout)

    kind.__deepcopy__ = deepcopy


def install() -> None:
    """Replaces ProcessGroupNCCL by one that runs over gloo with NCCL's rules of streams."""
    if not dist.is_available():
        return
    compiled: Any = importlib.import_module("torch._C._distributed_c10d")
    native = _load()
    native.set_factory(_gloo)

    _let_options_be_copied(compiled.Backend.Options)

    class Meta(type):
        """Makes `ProcessGroupNCCL(...)` create the native group, and isinstance() know it."""

        def __instancecheck__(cls, obj: object) -> bool:
            return isinstance(obj, native.SimNccl)

        def __call__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
            timeout = getattr(options, "_timeout", timeout or c10d.default_pg_timeout)
            inner = _gloo(store, rank, size, timeout)
            high = getattr(options, "is_high_priority_stream", False)
            members = list(getattr(options, "global_ranks_in_group", []))  # empty for the whole job
            return native.SimNccl(inner, rank, size, bool(high), members)

    class ProcessGroupNCCL(metaclass=Meta):
        """Stands where torch expects its own class."""

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    compiled._dump_nccl_trace = flight.dump
    compiled._dump_fr_trace = flight.without_group(native.INNER_GROUP, compiled._dump_fr_trace)
    for module in (c10d, dist, compiled):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)  # type: ignore[attr-defined]
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    if not hasattr(torch.cuda, "nccl"):
        torch.cuda.nccl = type("nccl", (), {})  # type: ignore[assignment]
    torch.cuda.nccl.version = lambda: VERSION  # type: ignore[attr-defined]
