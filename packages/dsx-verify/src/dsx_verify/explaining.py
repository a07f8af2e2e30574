"""Finds the kind of a fault, by the point of the step at which values differ."""

from __future__ import annotations

from .case import Case
from .gradient_faults import explain_gradient, explain_loss
from .receipt import Fault
from .update_faults import explain_update

__all__ = ["explain"]


def explain(case: Case) -> Fault:
    """The kind of fault, and the evidence."""
    kind = case.lead.kind
    direct = {
        "tied weights": "tied weights", "names": "names", "shape": "names", "dtype": "dtype", "buffer": "buffer",
        "random stream": "random stream", "frozen parameter": "frozen changed", "checkpoint": "checkpoint",
        "accumulation": "accumulation", "loss scale": "loss scale",
    }  # fmt: skip
    if kind in direct:
        return case.fault(direct[kind])
    if kind == "start":
        differ = len({d.rank for d in case.found}) < len(case.observed)
        return case.fault("ranks differ" if differ and len(case.observed) > 1 else "start")
    if kind == "loss":
        return explain_loss(case)
    if kind in ("gradient", "clipped gradient"):
        return explain_gradient(case)
    return explain_update(case)
