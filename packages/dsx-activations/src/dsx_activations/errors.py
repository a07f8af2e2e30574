"""Errors of dsx-activations: what was got, what was expected, what to do.

Mistakes in arguments derive from `ValueError`, states that do not allow a call from `RuntimeError`.
"""

from __future__ import annotations

from dsx_core import CodedError

__all__ = ["ActivationArgumentError", "ActivationConfigError", "ActivationError", "ActivationStateError"]


class ActivationError(CodedError):
    """Base class of the errors of dsx-activations. `code`: see `dsx_core.CodedError`."""


class ActivationConfigError(ActivationError, ValueError):
    """A setting that is wrong, or contradicts another one. `path` is its place in the configuration."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class ActivationArgumentError(ActivationError, ValueError):
    """An argument that does not fit: a shape, a number of pieces, a name of a module."""


class ActivationStateError(ActivationError, RuntimeError):
    """A call that is not possible in the present state, or a recomputation that could not give the same values."""
