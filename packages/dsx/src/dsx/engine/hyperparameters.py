"""Saves and restores the numbers in an optimizer's parameter groups (lr, betas, weight_decay, ...).

They change during training: schedules set rates and momenta, and scripts set other numbers. Most of torch's schedules
compute the next rate from the one in the group, so a run whose rates are not restored would train with wrong rates.

Switches (`amsgrad`, `fused`, ...) are left out: they belong to the configuration, and may differ between machines.
"""

from __future__ import annotations

from typing import Any

import torch

SCHEDULED = frozenset({"lr", "initial_lr", "betas", "momentum"})
"""The entries that schedules set."""


def numbers_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of each group, as Python numbers and tuples of them."""
    return [_numbers_of(group) for group in groups]


def _numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    # Parameters are left out by name, because a list of 0-dim parameters would look like numbers.
    options = ((name, value) for name, value in group.items() if name not in ("params", "param_names"))
    return {name: plain for name, value in options if (plain := _plain(value)) is not None}


def restore_numbers(
    groups: list[dict[str, Any]], saved: list[dict[str, Any]], *, scheduled: bool, others: bool
) -> list[str]:
    """Put saved numbers back into groups that have such entries, in the form they have there. Returns the changes as
    text.

    Args:
        groups: the optimizer's groups, as many as were saved.
        saved: the result of `numbers_of`.
        scheduled: restore the entries that schedules set.
        others: restore all other entries.
    """
    changes = []
    for index, (group, values) in enumerate(zip(groups, saved, strict=True)):
        for name, value in values.items():
            present = _plain(group.get(name))
            wanted = scheduled if name in SCHEDULED else others
            if not wanted or present is None or present == value:
                continue
            changes.append(f"param_groups[{index}]: {name} {present} -> {value}")
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = type(group[name])(value) if isinstance(value, tuple) else value
    return changes


def _plain(value: Any) -> Any:
    """A number or a tuple of numbers; None for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, (list, tuple)) and value and all(_plain(item) is not None for item in value):
        return tuple(_plain(item) for item in value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
