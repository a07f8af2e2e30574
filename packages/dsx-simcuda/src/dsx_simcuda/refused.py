"""What of torch.cuda is not simulated: each raises an error that names it, where it is used."""

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
    """Code that inductor compiles for CUDA cannot run here; torch.compile with other backends works."""
    from torch._dynamo.backends import registry

    lookup = registry.lookup_backend

    def checked(compiler_fn: Any) -> Any:
        compiler = lookup(compiler_fn)
        if compiler_fn != "inductor":
            return compiler

        def compile_fx(module: Any, example_inputs: Any, **keywords: Any) -> Any:
            if any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
                raise NotSimulated(
                    "torch.compile(backend='inductor') makes kernels for CUDA, which the simulated device cannot run;"
                    " use backend='aot_eager' for tests without a GPU"
                )
            return compiler(module, example_inputs, **keywords)

        return compile_fx

    registry.lookup_backend = checked


def install_refusals() -> None:
    """Puts the refusals in place."""
    cuda: Any = torch.cuda
    for name, why in WHY.items():
        there = getattr(cuda, name, None) or getattr(cuda.memory, name, None) or getattr(cuda.graphs, name, None)
        make = _refusing_class if isinstance(there, type) or there is None else _refusing_function
        for module in (cuda, cuda.memory, cuda.graphs, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, make(name, why))
