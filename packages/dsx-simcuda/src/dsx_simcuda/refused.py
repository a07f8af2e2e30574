"""The parts of torch.cuda that are not simulated: each raises an error that names it, where it is used."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

WHY = {
    "CUDAGraph": "graphs are captured from CUDA's own streams",
    "graph": "graphs are captured from CUDA's own streams",
    "make_graphed_callables": "graphs are captured from CUDA's own streams",
    "graph_pool_handle": "graphs are captured from CUDA's own streams",
    "MemPool": "the simulated allocator has no pools of the user",
    "use_mem_pool": "the simulated allocator has no pools of the user",
    "CUDAPluggableAllocator": "the allocator is the simulated one",
    "change_current_allocator": "the allocator is the simulated one",
    "memory_snapshot": "the simulated allocator keeps no snapshot; reports have the stacks of allocations",
    "ExternalStream": "a stream of another library is a real one",
}


class NotSimulated(NotImplementedError):
    """A part of CUDA that the simulated device does not have."""


def _refuse(name: str, why: str) -> NoReturn:
    raise NotSimulated(
        f"torch.cuda.{name} is not simulated (dsx-simcuda): {why}; switch it off for tests without a GPU"
    )


def _refusing_class(name: str, why: str) -> type:
    def new(cls: type, *arguments: Any, **keywords: Any) -> NoReturn:
        _refuse(name, why)

    return type(name, (), {"__new__": new, "__doc__": f"Not simulated: {why}."})


def _refusing_function(name: str, why: str) -> Any:
    def refuse(*arguments: Any, **keywords: Any) -> NoReturn:
        _refuse(name, why)

    return refuse


def _refuse_inductor() -> None:
    """Kernels that inductor makes for CUDA cannot run here; other backends of torch.compile, and CPU tensors, can."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    call = wrapper.__call__

    def checked(self: Any, model: Any, inputs: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs):
            raise NotSimulated(
                "torch.compile with inductor makes kernels for CUDA, which the simulated device cannot run"
                " (dsx-simcuda); use backend='aot_eager' in such tests"
            )
        return call(self, model, inputs)

    wrapper.__call__ = checked


def install_refusals() -> None:
    """Puts the refusals in place."""
    cuda: Any = torch.cuda
    for name, why in WHY.items():
        there = getattr(cuda, name, None) or getattr(cuda.memory, name, None) or getattr(cuda.graphs, name, None)
        make = _refusing_class if isinstance(there, type) or there is None else _refusing_function
        for module in (cuda, cuda.memory, cuda.graphs, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, make(name, why))
    _refuse_inductor()
