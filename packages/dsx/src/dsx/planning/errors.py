"""What can be wrong with a question to the planner."""

from __future__ import annotations

from ..errors import DsxError

__all__ = ["MachineError", "PlanError"]


class PlanError(DsxError, ValueError):
    """A plan cannot be made; says of what, why, and what to do."""


class MachineError(PlanError):
    """A description of a machine that is unknown, incomplete, or of another machine."""
