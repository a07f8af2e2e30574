"""What can be wrong with a question to the planner."""

from __future__ import annotations

from ..errors import DsxError

__all__ = ["MachineError", "PlanError", "explains_itself"]


class PlanError(DsxError, ValueError):
    """A plan cannot be made; says of what, why, and what to do."""


class MachineError(PlanError):
    """A description of a machine that is unknown, incomplete, or of another machine."""


def explains_itself(error: BaseException) -> bool:
    """Whether an error is dsx's own and says what is wrong with a model or its configuration."""
    return isinstance(error, DsxError) or type(error).__module__.partition(".")[0].startswith("dsx_")
