"""Weights that stages of a pipeline share: each stage has a copy, and the gradients of the copies are added up.

After the last backward of an update each copy's gradient becomes the sum over the stages that hold one. Only one copy
counts in the norm of the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["SharedWeights", "Tie", "shared_weight_ranks"]


class Tie(Protocol):
    """One shared weight of this rank (`dsx_pipe.ties.Tie`)."""

    name: str
    group: Any

    @property
    def owned(self) -> bool: ...


def shared_weight_ranks(ranks: Any, ties: tuple[Tie, ...]) -> Callable[[Any], Any]:
    """A function from a parameter to its rank set, with which copies of a shared weight count in the norm on one stage
    only.

    Args:
        ranks: (info) -> `dsx_comm.RankSet`, which does not consider shared weights.
        ties: shared weights of this rank.
    """
    copies = {tie.name for tie in ties if not tie.owned}

    def of(info: Any) -> Any:
        found = ranks(info)
        return dataclasses.replace(found, counts_in_norm=False) if info.name in copies else found

    return of


class SharedWeights:
    """The shared weights of this rank.

    Args:
        module: has the copies of this rank.
        ties: says which they are.
        reduce: reduces the gradients of the update over the data-parallel ranks.
        sum_over: (tensor, group) -> the tensor, summed over the group in place.
        read_gradient, write_gradient: read and write a parameter's full averaged gradient; collective over its
            data-parallel ranks.
        fills_unused: a gradient can only be written where a backward gave one; False at ZeRO stage 3.
    """

    def __init__(
        self,
        module: nn.Module,
        ties: Sequence[Tie],
        *,
        reduce: Callable[[], object],
        sum_over: Callable[[torch.Tensor, Any], object],
        read_gradient: Callable[[Any], torch.Tensor | None],
        write_gradient: Callable[[Any, torch.Tensor], None],
        fills_unused: bool,
    ) -> None:
        self._module, self._ties, self._reduce, self._sum_over = module, tuple(ties), reduce, sum_over
        self._read, self._write, self._fills_unused = read_gradient, write_gradient, fills_unused
        self._used: set[str] = set()  # shared weights that have got a gradient in this update
        for tie in self._ties:
            parameter = module.get_parameter(tie.name)
            if parameter.requires_grad:
                parameter.register_hook(partial(_note_use, self._used, tie.name))  # keeps no engine alive

    def fill_unused(self, begin_backward: Callable[[], object]) -> None:
        """Give shared weights that this rank has not used so far a gradient of zeros, to which that of the other stages
        is added (an embedding of positions beside tied words). The last backward may still use them.

        Args:
            begin_backward: called before the backward that gives the zeros.
        """
        left = [tie.name for tie in self._ties if tie.name not in self._used]
        unused = [p for p in map(self._module.get_parameter, left) if p.requires_grad]
        if unused and self._fills_unused:
            begin_backward()
            with torch.enable_grad():
                torch.stack([(p.reshape(-1)[:1] * 0).sum() for p in unused]).sum().backward()
        self._used.clear()

    def sum_gradients(self) -> None:
        """Each copy's gradient becomes the sum over the stages that hold one (collective). A copy whose gradient cannot
        be read or written takes part all the same, because other stages wait for it in the sum.
        """
        failed: list[Exception] = []
        if self._ties:
            self._reduce()
        for tie in self._ties:
            parameter = self._module.get_parameter(tie.name)
            if not parameter.requires_grad:
                continue
            gradient = None
            with _noting(failed):
                gradient = self._read(parameter)
            if gradient is None:
                gradient = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            self._sum_over(gradient, tie.group)
            with _noting(failed):
                self._write(parameter, gradient)
        if failed:
            raise failed[0]


@contextmanager
def _noting(failed: list[Exception]) -> Iterator[None]:
    """An error in the block is kept and not raised."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (the caller raises it)
        failed.append(error)


def _note_use(used: set[str], name: str, gradient: torch.Tensor) -> None:
    used.add(name)
