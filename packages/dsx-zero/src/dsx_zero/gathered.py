"""``GatheredParameters``: whole parameters inside a context, outside the forward of their modules.

Edits are kept only if a ``modifier_rank`` says whose edits they are. Without one, an edit raises an error when the
context ends, so that no edit is lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import dsx_comm
import torch
from dsx_comm import RankSet
from dsx_comm.fingerprint import fingerprint
from torch import nn

from .access import safe_set_full_fp32_param
from .errors import ZeroStateError
from .gather.external import register_external_parameter
from .params.init import InitParameter
from .params.partitioned import PartitionedParameter
from .params.partitioned_unit import UnitParameter
from .params.restored import current_parameter
from .state.moving import OffloadStateTypeEnum
from .view import OWNERS

__all__ = ["GatheredParameters", "UnownedEditError"]


class UnownedEditError(ZeroStateError):
    """Parameters were changed inside ``GatheredParameters`` without a ``modifier_rank``."""

    code = "DSX307"


class GatheredParameters:
    """Gather parameters for reading or changing them (collective: every rank enters and leaves).

        with dsx_zero.GatheredParameters(layer.weight, modifier_rank=0):
            if rank == 0:
                layer.weight.data[:, 0] = 0

    Inside, ``module.weight`` and the partitioned object itself can be used like any tensor.

    Args:
        params: a parameter, a module, or any nesting of lists and tuples of them, None among them for a parameter that
            a module does not have. Parameters that are not partitioned are taken as they are. Their order does not
            matter, also not that of a set, which differs between ranks; only of buffers and the like with one shape
            and equal values it has to be the same on all ranks.
        modifier_rank: the rank whose values all ranks have at the end (its number among the ranks that share the
            parameter: all data-parallel ranks, or those of an expert's own group); None for reading.
        fwd_module: a module whose forward uses the parameters although they are not its own; they are registered with
            it.
        enabled: False makes the context do nothing.

    Raises:
        UnownedEditError: at the end, if parameters were changed without a ``modifier_rank``.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        self._parameters = list({id(p): p for p in _flatten(params)}.values()) if enabled else []
        self._modifier = modifier_rank
        self._stack = ExitStack()
        self._before: dict[int, tuple[str, torch.Tensor, int]] = {}
        self._plain: list[tuple[torch.Tensor, int]] = []
        self._opened: list[tuple[UnitParameter | InitParameter, torch.Tensor]] = []
        if fwd_module is not None and enabled:
            for parameter in self._parameters:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> GatheredParameters:
        try:
            self._open()
        except BaseException:
            for source, _ in self._opened:
                source.close(source_rank=None)
            self._opened = []
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        for owner in {id(o[0]): o[0] for p in self._parameters if (o := OWNERS.find(p)) is not None}.values():
            owner.moved.check(OffloadStateTypeEnum.lp_params)
        sources = [p.source for p in self._parameters if isinstance(p, PartitionedParameter)]
        sources.sort(key=_order)
        by_owner: dict[int, list[UnitParameter]] = {}
        for source in sources:
            if isinstance(source, UnitParameter):
                by_owner.setdefault(id(source.unit.gather_on_use), []).append(source)
        for group in by_owner.values():
            gather_on_use = group[0].unit.gather_on_use
            if gather_on_use is not None:
                self._stack.enter_context(gather_on_use.gathered([source.unit.index for source in group]))
        for source in sources:
            if isinstance(source, (UnitParameter, InitParameter)):
                self._opened.append((source, source.open()))
        if self._modifier is None:
            for source, whole in self._opened:
                self._remember(source, whole)
                if isinstance(source, UnitParameter):  # `safe_set_full_fp32_param` is no edit of the user's
                    remember = partial(self._remember, source, whole)
                    source.on_refresh.append(remember)
                    self._stack.callback(source.on_refresh.remove, remember)
        else:
            plain = (p for p in self._parameters if not isinstance(p, PartitionedParameter) and p.numel())
            self._plain = sorted(((p, fingerprint(p)) for p in plain), key=_order_of_plain)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        modifier = self._modifier if kind is None else None
        before = self._before.values() if kind is None else ()
        changed = [name for name, whole, known in before if fingerprint(whole) != known]
        with torch.no_grad(), self._stack:
            for source, _ in self._opened:
                source.close(source_rank=modifier)
            if modifier is not None:
                self._spread_plain(modifier)
        self._opened, self._before, self._plain = [], {}, []
        if changed:
            raise UnownedEditError(
                f"GatheredParameters: changed without a modifier_rank: {', '.join(changed)}. The changes are undone;"
                " give modifier_rank=0 (all ranks take rank 0's values) to keep them"
            )

    def _remember(self, source: UnitParameter | InitParameter, whole: torch.Tensor) -> None:
        """The parameter has the values that it keeps without edits of the user's."""
        self._before[id(source)] = (source.name, whole, fingerprint(whole))

    def _spread_plain(self, modifier: int) -> None:
        """Parameters that every rank holds whole get the modifier's values on all ranks, and so do their masters."""
        for parameter, before in self._plain:
            whole, owner = parameter.detach().contiguous(), OWNERS.find(parameter)
            ranks = RankSet.over() if owner is None else owner[0].layout.group_of(owner[1]).ranks
            if ranks.size > 1:
                dsx_comm.broadcast(whole, src=dsx_comm.get_global_rank(ranks.holders, modifier), group=ranks.holders)
            if fingerprint(whole) == before:
                continue  # the same decision on every rank: `before` was, and `whole` is, equal on all
            parameter.detach().copy_(whole)
            if owner is not None and owner[0].layout.group_of(owner[1]).trainable:
                safe_set_full_fp32_param(parameter, whole)


def _order(source: Any) -> tuple[int, int, str]:
    """A place that every rank gives to the parameter: programs pass sets, whose order differs between ranks, and then
    one parameter would get another one's values.
    """
    if isinstance(source, UnitParameter):
        return 1, source.unit.index, source.name
    return (0, source.number, "") if isinstance(source, InitParameter) else (2, 0, "")


def _order_of_plain(plain: tuple[torch.Tensor, int]) -> tuple[str, tuple[int, ...], str, int]:
    parameter, values = plain
    owner = OWNERS.find(parameter)
    return "" if owner is None else owner[1], tuple(parameter.shape), str(parameter.dtype), values


def _flatten(params: Any) -> Iterator[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        yield current_parameter(params)
    elif isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, Iterable):
        for item in params:
            if item is not None:  # a bias that a module does not have
                yield from _flatten(item)
    else:
        raise TypeError(
            f"GatheredParameters got {type(params).__name__}, expected parameters, modules, or lists of them"
        )
