"""The errors of dsx-ops: each says what it got, what it expected and what to do."""

from __future__ import annotations


class OpsError(RuntimeError):
    """Base of what goes wrong at run time in dsx-ops."""


class TensorError(ValueError):
    """A tensor has the wrong size, dtype, layout or device. Nothing was written."""


class HyperparameterError(ValueError):
    """A number such as the learning rate is out of its range."""
