"""Errors of dsx-zero: what was got, what was expected, what to do.

Mistakes in arguments derive from `ValueError`, states that do not allow a call from `RuntimeError`.
"""

from __future__ import annotations

from dsx_core import CodedError

__all__ = ["ZeroConfigError", "ZeroError", "ZeroLoadError", "ZeroModelError", "ZeroOptimizerError", "ZeroStateError"]

HAS_NO_EFFECT = "DSX351"
"""The code of warnings about settings that change nothing."""


class ZeroError(CodedError):
    """Base class of the errors of dsx-zero. `code`: see `dsx_core.CodedError`."""


class ZeroConfigError(ZeroError, ValueError):
    """A setting that is wrong or not available yet. `path` is its place in the configuration."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class ZeroModelError(ZeroError, ValueError):
    """A model that cannot be sharded as it is."""


class ZeroOptimizerError(ZeroError, ValueError):
    """An optimizer that cannot work on shards, or does not belong to the model."""


class ZeroStateError(ZeroError, RuntimeError):
    """A call that is not possible in the present state of the model or the optimizer."""


class ZeroLoadError(ZeroError, RuntimeError):
    """Files of weights that cannot be read, or do not fit the model."""
