"""Puts the simulated collective backend where torch looks for `nccl`."""

import importlib.util

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from . import native as loaded
from .building import GROUP


def _load():
    spec = importlib.util.spec_from_file_location("_dsx_simnccl", str(loaded.folder / GROUP))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install():
    """Replaces ProcessGroupNCCL by one that runs over gloo with NCCL's rules of streams."""
    native = _load()
    backend = torch._C._distributed_c10d.Backend

    class Options:
        backend = "nccl"

        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = type("Config", (), {})()

    class Meta(type):
        """Makes `ProcessGroupNCCL(...)` create the native group, and isinstance() know it."""

        def __instancecheck__(cls, obj):
            return isinstance(obj, backend) and obj.name() == "nccl"

        def __call__(cls, store, rank, size, options=None, timeout=None):
            timeout = getattr(options, "_timeout", timeout or c10d.default_pg_timeout)
            inner = c10d.ProcessGroupGloo(c10d.PrefixStore("sim", store), rank, size, timeout=timeout)
            return native.create(inner, rank, size, bool(getattr(options, "is_high_priority_stream", False)))

    class ProcessGroupNCCL(metaclass=Meta):
        pass

    ProcessGroupNCCL.Options = Options
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = torch._C._distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    if not hasattr(torch.cuda, "nccl"):
        torch.cuda.nccl = type("nccl", (), {})
    torch.cuda.nccl.version = lambda: (2, 28, 9)
