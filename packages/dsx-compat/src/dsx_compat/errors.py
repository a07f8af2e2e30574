"""The errors of a program that uses the `deepspeed` module of dsx."""

from __future__ import annotations

from dsx.errors import DsxError

__all__ = [
    "CompatError",
    "CompatWarning",
    "MemberNotSupportedError",
    "NotSupportedError",
    "ShardValueError",
    "WrongDeepSpeedError",
]


class CompatError(DsxError):
    """Base class of the errors of dsx-compat."""


class NotSupportedError(CompatError, ImportError):
    """dsx does not have this name of DeepSpeed; the text says what to use instead."""

    code = "DSX604"


class MemberNotSupportedError(CompatError, AttributeError):
    """An object does not have this member of DeepSpeed's; the text says what to use instead. `hasattr` is False."""

    code = "DSX604"


class ShardValueError(CompatError, ValueError):
    """Values do not fit the part of a parameter that this rank has."""

    code = "DSX605"


class WrongDeepSpeedError(CompatError, RuntimeError):
    """Another `deepspeed` was imported already, or its files have overwritten ours."""

    code = "DSX603"


class CompatWarning(UserWarning):
    """A setting of a program has no effect here, or an effect that its author may not expect."""
