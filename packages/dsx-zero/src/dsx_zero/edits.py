"""Edits of low-precision parameters between steps reach their masters, instead of being overwritten by them at the next step.

A parameter is a normal tensor to its user (C1), so `torch.nn.init.zeros_(layer.weight)` or `weight.mul_(mask)` after sharding has to last. Where
the master is memory of its own the edit must get there. autograd's version counter says cheaply that a parameter was written in place; then, and
only then, its values are compared with what its master rounds to, and elements that differ are taken over. The others keep their low bits.

Leaves out: writes through `.data`, which count no versions; `safe_set_full_fp32_param` is the way for those.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .flat import FlatGroup

__all__ = ["Edits"]


class Edits:
    """Watches the parameters of resident groups whose masters are memory of their own."""

    def __init__(self, groups: Iterable[FlatGroup], *, whole: bool) -> None:
        self._groups = [group for group in groups if _has_own_master(group)]
        self._whole = whole
        self._seen = {group: self._versions(group) for group in self._groups}

    @staticmethod
    def _versions(group: FlatGroup) -> list[int]:
        return [parameter._version for parameter in group.parameters]

    def take_over(self) -> None:
        """Bring edits since the last call into the masters."""
        for group in self._groups:
            versions = self._versions(group)
            if versions != self._seen[group]:
                self._seen[group] = versions
                self._compare(group)

    def _compare(self, group: FlatGroup) -> None:
        visible, master = (group.full if self._whole else group.shard), group.master
        if master is None:
            return
        edited = visible != master.to(visible.dtype)
        torch.where(edited, visible.to(master.dtype), master, out=master)


def _has_own_master(group: FlatGroup) -> bool:
    resident = group.full.numel() == group.layout.numel
    return group.trainable and resident and group.own_master(group.full) is not None
