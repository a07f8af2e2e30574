"""The engine of the constructors' second argument, `deepspeed`: one that reduces gradients during backward unless its
flag says no.

Such an engine has an attribute `enable_backward_allreduce` (and, where it runs pipelines,
`pipeline_enable_backward_allreduce`). The optimizer sets both before each backward: true where the coming step wants
the mean gradient, false where it wants this rank's own.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CommArgumentError

FLAG, PIPELINE_FLAG = "enable_backward_allreduce", "pipeline_enable_backward_allreduce"


class EngineSwitch:
    """Sets the flags of one engine.

    Raises:
        CommArgumentError: the object is no such engine.
    """

    def __init__(self, engine: Any) -> None:
        if isinstance(engine, (int, float, torch.Tensor)):
            raise CommArgumentError(
                f"deepspeed: got {engine!r} as the second positional argument, expected an engine or None; "
                f"pass lr by name: lr={engine!r}"
            )
        if not hasattr(engine, FLAG):
            raise CommArgumentError(
                f"deepspeed: got {type(engine).__name__}, expected an engine with the attribute {FLAG}; "
                "leave it out where gradients "
                "stay local, and with dsx.initialize, which connects the optimizer itself"
            )
        self._flags = [name for name in (FLAG, PIPELINE_FLAG) if hasattr(engine, name)]
        self._engine = engine

    def reduce_gradients(self, wanted: bool) -> None:
        """Let the engine reduce the gradients of the next backward, or leave them local."""
        for name in self._flags:
            setattr(self._engine, name, wanted)
