"""Steps that repeat the one before: the tables of addresses are kept, and only what can have changed is looked at again.

With thousands of small tensors a step costs what Python does per tensor, not what memory does. A ledger holds one batch's table and who its
tensors were. In the next step it reads all addresses anew (tensors may have moved), and checks thoroughly only columns with other objects or other
addresses than before. Anything unusual, and the ledger says no: then the ordinary way is taken, which finds out what it is and names errors.

Only for tensors in host memory with native code, and without copies.
"""

from __future__ import annotations

from array import array
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from .. import native
from ..backends import native_cpu
from ..spec import Algorithm, Batch, Lowered

if TYPE_CHECKING:
    from ._base import FusedOptimizer

_grad, _dtype, _layout, _is_cpu = map(attrgetter, ("grad", "dtype", "layout", "is_cpu"))
_step = itemgetter("step")


class _Column:
    """One tensor per row of a table: who they were and where, and what any that take their place must be like.

    It keeps none of them alive: an id counts only as long as nobody has died.
    """

    def __init__(self, index: int, tensors: list[Tensor], *, loose: bool) -> None:
        """`loose`: in other people's hands, who may turn or resize them in place."""
        self._index, self._loose, self._dtypes = index, loose, {tensors[0].dtype}
        self._numels = list(map(Tensor.numel, tensors))
        self._addresses = array("q", map(Tensor.data_ptr, tensors))
        self._ids: list[int] = []
        self._refs: list[ref[Tensor]] = []
        self._lost: list[ref[Tensor]] = []
        self._watch(list(map(id, tensors)), tensors)

    def renew(self, tensors: list[Tensor], table: array) -> bool:
        """Write the addresses of `tensors` into `table`; False when one of them is not as `spec.check_slot` asks."""
        ids, addresses = list(map(id, tensors)), array("q", map(Tensor.data_ptr, tensors))
        seen = ids == self._ids
        if seen and self._refs and not self._lost and addresses == self._addresses:
            return not self._loose or self._whole(tensors)
        if not self._fit(tensors):
            return False
        table[self._index :: native_cpu.WIDTH] = self._addresses = addresses
        if seen:
            self._watch(ids, tensors)
        else:  # perhaps new in every step, as gradients often are: references to those would cost more than they save
            self._ids, self._refs = ids, []
        return True

    def _watch(self, ids: list[int], tensors: list[Tensor]) -> None:
        lost: list[ref[Tensor]] = []
        self._ids, self._lost, self._refs = ids, lost, [ref(t, lost.append) for t in tensors]

    def _fit(self, tensors: list[Tensor]) -> bool:
        return (
            set(map(_layout, tensors)) == {torch.strided}
            and set(map(_dtype, tensors)) == self._dtypes
            and all(map(_is_cpu, tensors))
            and self._whole(tensors)
        )

    def _whole(self, tensors: list[Tensor]) -> bool:
        return all(map(Tensor.is_contiguous, tensors)) and list(map(Tensor.numel, tensors)) == self._numels


class _Ledger:
    """One batch: its table, and the columns it is made of."""

    def __init__(self, batch: Batch, states: list[dict[str, Any]]) -> None:
        self.group, self.algorithm, self.step = batch.group, batch.algorithm, batch.hyper.step
        self.table, self.dtypes = native_cpu.table(batch), native_cpu.dtypes(batch)
        self.params = [s.param for s in batch.slots]
        self._param_dtypes = {self.params[0].dtype}
        columns = list(map(list, zip(*map(native_cpu.columns, batch.slots))))
        self._param = _Column(native_cpu.PARAM, self.params, loose=True)
        self._grad = _Column(native_cpu.GRAD, columns[native_cpu.GRAD], loose=True)
        self._kept: list[tuple[str, _Column]] = []
        for i, tensors in enumerate(columns):
            if i > native_cpu.GRAD and tensors[0] is not None:
                key = next(k for k, v in states[0].items() if v is tensors[0])
                self._kept.append((key, _Column(i, tensors, loose=False)))

    def renew(self, states: list[dict[str, Any]]) -> bool:
        """Read all addresses anew. False when this is no repetition."""
        # `.data` may change a dtype though object and address stay.
        return (
            set(map(_dtype, self.params)) == self._param_dtypes
            and set(map(_step, states)) == {self.step}
            and all(column.renew(list(map(itemgetter(key), states)), self.table) for key, column in self._kept)
            and self._param.renew(self.params, self.table)
            and self._grad.renew(list(map(_grad, self.params)), self.table)
        )


class Repeat:
    """The batches of one step, to be gone over again."""

    def __init__(self, optimizer: FusedOptimizer, batches: list[Batch]) -> None:
        self._ledgers = [_Ledger(b, [optimizer.state[s.param] for s in b.slots]) for b in batches]
        self._params = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
        busy = {id(p) for ledger in self._ledgers for p in ledger.params}
        self._idle = [p for p in self._params if id(p) not in busy]

    @classmethod
    def of(cls, optimizer: FusedOptimizer, batches: list[Batch]) -> Repeat | None:
        """For a step just made; None when its like cannot be gone over again."""
        fit = native.module() is not None and all(
            b.algorithm is not Algorithm.LAMB
            and b.guard is None
            and all(s.copy is None and s.param.is_cpu and not s.is_shard for s in b.slots)
            for b in batches
        )
        return cls(optimizer, batches) if fit else None

    def run(self, optimizer: FusedOptimizer, scale: float | Tensor) -> bool:
        """Make the step, and count it; False, and nothing done, when this is no repetition."""
        module = native.module()
        if module is None or not self._same_params(optimizer):
            return False
        states: list[list[Any]] = [list(map(optimizer.state.get, ledger.params)) for ledger in self._ledgers]
        try:
            if not all(ledger.renew(mine) for ledger, mine in zip(self._ledgers, states)):
                return False
        except (AttributeError, KeyError, TypeError, RuntimeError):
            # A gradient or a state that is None or missing, a layout without addresses: the ordinary way says which.
            return False
        numbers = [self._numbers(optimizer, ledger, scale) for ledger in self._ledgers]
        for ledger, mine, lowered in zip(self._ledgers, states, numbers):
            native_cpu.step(module, ledger.algorithm, ledger.table, ledger.dtypes, lowered)
            ledger.step += 1
            for state in mine:
                state["step"] = ledger.step
        return True

    def _same_params(self, optimizer: FusedOptimizer) -> bool:
        params = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and all(p.grad is None for p in self._idle)
        )

    def _numbers(self, optimizer: FusedOptimizer, ledger: _Ledger, scale: float | Tensor) -> Lowered:
        group = optimizer.param_groups[ledger.group]
        return optimizer._hyper(group, ledger.step + 1, scale).lowered(ledger.algorithm)
