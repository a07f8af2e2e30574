"""Errors of the planner."""

from __future__ import annotations

from dsx_core import CodedError

__all__ = ["MachineError", "NoEngineError", "PlanError", "explains_itself"]


class PlanError(CodedError, ValueError):
    """A plan cannot be made; says of what, why, and what to do."""


class MachineError(PlanError):
    """A description of a machine that is unknown, incomplete, or of another machine."""


class NoEngineError(PlanError):
    """There is no engine to make plans with, or no single one."""


def explains_itself(error: BaseException) -> bool:
    """Whether an error is one of ours and says what is wrong with a model or its configuration."""
    return isinstance(error, CodedError) or type(error).__module__.partition(".")[0].startswith("dsx_")
