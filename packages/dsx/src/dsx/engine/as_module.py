"""The engine as a `torch.nn.Module`, for programs that take any module.

The engine is a module with one child, `module`, so that `isinstance(engine, nn.Module)` is true, `.module` unwraps it,
and `train()`, `eval()` and forward hooks work. Parameters, buffers and state dicts are those of the child, with its
names and without a prefix. Attributes that the engine does not have are looked up in the child: `engine.generate(...)`
calls the model's method. Left out: moving or casting the engine moves or casts a sharded model; dsx-zero decides
whether that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..deepspeed_names import PLACES, finder
from .errors import EngineArgumentError

if TYPE_CHECKING:
    from .parts import EngineParts


class EngineModule(nn.Module):
    """The module's side of `Engine`."""

    _parts: EngineParts
    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    # - Mode. Only the child has a flag: `engine.module.eval()` puts the engine into evaluation mode too.

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Whether the module is in training mode."""
        module = self.__dict__.get("_modules", {}).get("module")
        return True if module is None else module.training

    @training.setter
    def training(self, mode: bool) -> None:
        """nn.Module sets this on itself; `train` sets the child's."""

    def train(self, mode: bool = True) -> Any:
        """Put the module into training mode; returns the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        """Put the module into evaluation mode; returns the engine."""
        return self.train(False)

    # - Parameters, buffers, state

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The same as of the module, with its names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The same as of the module, with its names."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state dict of the module. At stage 3 use `module_state_dict()`, which gathers."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load into the module. `load_module_state_dict` also updates the optimizer's fp32 master weights."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Device of the module's first parameter or buffer."""
        for _, tensor in (*self.named_parameters(), *self.named_buffers()):
            return tensor.device
        return torch.device("cpu")

    # - Compilation

    def compile(  # type: ignore[override]
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
    ) -> None:
        """Compile the module's blocks in place, at every ZeRO stage; a module without blocks as a whole.

        Hooks, gathering and recomputation stay around the graphs. Below stage 3 the module as a whole can be compiled
        with `engine.module.compile()`.

        Args:
            backend: as for `torch.compile`.
            compile_kwargs: further arguments of `torch.compile`.
            schedule: must be None. DeepCompile's graph passes, which schedule gathers, are not available.

        Raises:
            EngineArgumentError: a schedule is given.
        """
        if schedule is not None:
            raise EngineArgumentError(
                "compile(schedule=...): graph passes that schedule gathers are not available yet; leave it out"
            )
        from dsx_zero import compile_units  # lazy import: only this call needs it

        compile_units(self.module, backend=backend, **dict(compile_kwargs or {}))

    if TYPE_CHECKING:
        __getattr__: None  # type: ignore[assignment]  # with nn.Module's own every misspelt method would pass a checker
    else:

        def __getattr__(self, name: str) -> Any:
            # Python calls this only for names that neither the engine nor nn.Module has.
            try:
                return super().__getattr__(name)
            except AttributeError:
                module = self.__dict__.get("_modules", {}).get("module")
            if name.startswith("_") or module is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            try:
                return getattr(module, name)
            except AttributeError:
                if name in PLACES["dsx.Engine"]:
                    return finder("dsx.Engine")(name).__get__(self)
                raise AttributeError(
                    f"neither the engine nor its module ({type(module).__name__}) has an attribute {name!r}"
                ) from None
