"""Finds the kind of a fault in an update: what the optimizer did with right gradients.

The oracle from before the update is stepped in each wrong way that is known, with the gradients that the system had. A
way that gives the system's values is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .case import Case, flat, ratio
from .receipt import Fault

__all__ = ["explain_update"]

_ERROR = 5e-3


def explain_update(case: Case) -> Fault:
    """The kind of fault of a number of updates, a learning rate or a parameter."""
    lead = case.lead
    if lead.kind == "number of updates":
        none = case.observed[lead.rank].updates == 0
        return case.fault("step skipped" if none else "step doubled")
    if lead.kind == "learning rate":
        factor = lead.got / lead.expected if lead.expected else float("inf")
        return case.fault("learning rate", f"{factor:.6g} times what it should be", *_other_step(case))
    return _parameter(case)


def _other_step(case: Case) -> tuple[str, ...]:
    """Whether the rate is that of another step of the schedule."""
    reference, got = case.reference, case.lead.got
    if reference is None or reference.oracle.schedule is None:
        return ()
    trial = reference.oracle.twin()
    schedule: Any = trial.schedule
    for ahead in range(1, 4 * case.count * case.expected.accumulation + 1):
        schedule.step()
        if any(abs(rate - got) <= 1e-6 * abs(got) for rate in trial.lr()):
            return (f"it is the rate of {ahead} updates later",)
    return ("it is the rate of no later update that is near",)


def _parameter(case: Case) -> Fault:
    lead, seen = case.lead, case.observed[case.lead.rank]
    names = [name for name in case.names if name in seen.after]
    before, after = {n: seen.before[n].double() for n in names}, {n: seen.after[n].double() for n in names}
    change = {n: after[n] - before[n] for n in names}
    if float(change[lead.name].abs().max()) == 0.0:
        everything = all(torch.equal(seen.before[n], seen.after[n]) for n in seen.after)
        told = "no parameter changed" if everything else "it did not change in this update"
        return case.fault("step skipped" if everything else "stale weights", told)
    others = [
        r for r, other in enumerate(case.observed) if not torch.equal(other.after[lead.name], seen.after[lead.name])
    ]
    right = {d.rank for d in case.found if d.name == lead.name}
    differ = (f"rank {others[0]} holds other values",) if others else ()
    grads = {n: seen.gradients.get(n, torch.zeros_like(before[n])).double() for n in names}
    found = _known_ways(case, names, before, change, grads)
    if found is not None:
        return case.fault(*found, *differ)
    if others and len(right) < len(case.observed):
        return case.fault("ranks differ", *differ)
    return case.fault("optimizer rule", *differ)


def _known_ways(case: Case, names: list[str], before: Any, change: Any, grads: Any) -> tuple[str, str] | None:
    """The first wrong way that gives these changes: kind and words."""
    oracle = case.kept
    if oracle is None:
        return None
    got = flat([change[n] for n in names])
    for kind, words, way in _WAYS:
        trial = oracle.twin()
        trial.grads = _gradients(case, trial)
        way(trial)
        factor, error = ratio(got, flat([trial.masters[n].detach().double() - before[n] for n in names]))
        if error < _ERROR and abs(factor - 1) < 0.01:
            return kind, words
    return _proportional(case, names, before, change, grads, got)


def _gradients(case: Case, oracle: Any) -> dict[str, torch.Tensor]:
    """The gradients that the system's optimizer had, for the oracle."""
    seen = case.observed[case.lead.rank].gradients
    masters = oracle.masters.items()
    return {name: seen.get(name, torch.zeros_like(master)).to(master.dtype) for name, master in masters}


def _proportional(
    case: Case, names: list[str], before: Any, change: Any, grads: Any, got: torch.Tensor
) -> tuple[str, str] | None:
    """Changes that are a multiple of something: of the right change, of the gradient, of the parameter."""
    reference = case.reference
    if reference is None:
        return None
    right = flat([reference.oracle.masters[n].detach().double() - before[n] for n in names])
    factor, error = ratio(got, right)
    if error < _ERROR:
        return "learning rate", f"all changes are {factor:.6g} times what they should be"
    factor, error = ratio(got, flat([grads[n] for n in names]))
    if error < _ERROR and factor < 0:
        return "plain SGD", f"the change is {factor:.6g} times the gradient"
    factor, error = ratio(got - right, flat([before[n] for n in names]))
    if error < 0.05 and factor:
        return "wrong decay", f"what is wrong is {factor:.4g} times the parameter itself"
    name = names[0]
    for other, master in reference.oracle.masters.items():
        if other != name and master.shape == before[name].shape and other in case.observed[0].before:
            theirs = flat([master.detach().double() - case.observed[0].before[other].double()])
            factor, error = ratio(flat([change[name]]), theirs)
            if error < _ERROR and abs(factor - 1) < 0.01:
                return "other tensor", f"it is the change of {other}"
    return None


def _step(oracle: Any) -> None:
    oracle.schedule = None
    oracle.update()


def _twice(oracle: Any) -> None:
    grads = oracle.grads
    _step(oracle)
    oracle.grads = grads
    _step(oracle)


def _no_decay(oracle: Any) -> None:
    for group in oracle.optimizer.param_groups:
        group["weight_decay"] = 0.0
    _step(oracle)


def _decay_all(oracle: Any) -> None:
    groups = oracle.optimizer.param_groups
    most = max(float(group.get("weight_decay", 0.0)) for group in groups)
    for group in groups:
        group["weight_decay"] = most
    _step(oracle)


def _forgetful(oracle: Any) -> None:
    oracle.optimizer.state.clear()
    _step(oracle)


def _steps_ahead(oracle: Any) -> None:
    for state in oracle.optimizer.state.values():
        if "step" in state:
            state["step"] += 1
    if not oracle.optimizer.state:  # no update so far: make the states, without moving anything
        values = {name: master.detach().clone() for name, master in oracle.masters.items()}
        grads, schedule, oracle.schedule = oracle.grads, oracle.schedule, None
        oracle.grads = {name: torch.zeros_like(grad) for name, grad in grads.items()}
        oracle.update()
        oracle.grads, oracle.schedule = grads, schedule
        with torch.no_grad():
            for name, master in oracle.masters.items():
                master.copy_(values[name])
    _step(oracle)


def _one_rate(choose: Callable[[list[float]], float]) -> Callable[[Any], None]:
    def way(oracle: Any) -> None:
        groups = oracle.optimizer.param_groups
        rate = choose([float(group["lr"]) for group in groups])
        for group in groups:
            group["lr"] = rate
        _step(oracle)

    return way


_WAYS: tuple[tuple[str, str, Callable[[Any], None]], ...] = (
    ("step doubled", "two updates with this gradient give these values", _twice),
    ("wrong decay", "an update without weight decay gives these values", _no_decay),
    ("wrong decay", "an update with the largest weight decay on all groups gives these values", _decay_all),
    ("optimizer states", "an update with empty optimizer states gives these values", _forgetful),
    ("optimizer states", "an update whose step counter is ahead by one gives these values", _steps_ahead),
    ("learning rate", "an update with the first group's rate for all gives these values", _one_rate(lambda r: r[0])),
    ("learning rate", "an update with the last group's rate for all gives these values", _one_rate(lambda r: r[-1])),
)
