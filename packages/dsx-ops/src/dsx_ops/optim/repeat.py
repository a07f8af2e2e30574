"""Steps that repeat the one before: the tables of addresses are kept, and filled again by native code that looks at
every tensor.

With thousands of small tensors a step costs what Python does per tensor, not what memory does. A ledger holds one
batch's table and what the tensors in it must be like. In the next step native code reads all addresses again (tensors
may have moved) and checks each tensor as `spec.check_slot` does; only then anything is written. Anything unusual, and
the ledger says no: then the ordinary way is taken, which finds out what it is and names errors. Between steps a ledger
holds parameters and numbers, so that it keeps no gradient and no state alive.

Only for plain tensors in host memory with native code, without copies, and with a PyTorch whose tensors offer DLPack's
C functions.
"""

from __future__ import annotations

from array import array
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import native, tables
from ..backends import native_cpu
from ..spec import Algorithm, Batch, Hyper, Lowered, Slot
from ..versions import wrote

_PLAIN = (Tensor, Parameter)
# DLPack's type codes and bits.
_KINDS = {
    torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.int16: (0, 16), torch.uint8: (1, 8),
}  # fmt: skip


class Stepping(Protocol):
    """What a repeated step asks of its optimizer."""

    state: Any
    param_groups: list[dict[str, Any]]

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float | Tensor) -> Hyper: ...


class _Ledger:
    """One batch: its table, and who fills it."""

    def __init__(self, batch: Batch, optimizer: Stepping, places: dict[int, int]) -> None:
        """`places`: where each parameter (by id) comes among those with a state."""
        self.group, self.algorithm, self.step = batch.group, batch.algorithm, batch.hyper.step
        self.table, self.dtypes = tables.update_table(batch), tables.update_dtypes(batch)
        self.params = [s.param for s in batch.slots]
        self._places = [places[id(p)] for p in self.params]
        columns = _columns(batch.slots[0], optimizer.state[self.params[0]])
        self.has_states = bool(batch.slots[0].states)
        self._state_keys = [key for _, key, _, _ in columns if key is not None]
        self._reader = native.module().Ledger(
            Tensor.__dlpack_c_exchange_api__,  # type: ignore[attr-defined]
            columns,
            array("q", chain.from_iterable(map(_sizes, batch.slots))),
        )

    def states(self, every: list[Any]) -> list[Any]:
        """Those of its parameters, of all that the optimizer has."""
        return list(map(every.__getitem__, self._places))

    def renew(self, states: list[Any]) -> bool:
        """Read all addresses again. False when this is no repetition."""
        return self._reader.read(self.params, states, self.step, self.table)

    def run(self, module: Any, states: list[Any], numbers: Lowered) -> None:
        """Make the step, and count it."""
        native_cpu.step(module, self.algorithm, self.table, self.dtypes, numbers)
        self.step += 1
        for state in states:
            state["step"] = self.step
        wrote(chain(self.params, *([state[key] for state in states] for key in self._state_keys)))


def _columns(slot: Slot, state: dict[str, Any]) -> list[tuple[int, str | None, int, int]]:
    """Of each column of the table that is used: index, where in a state its tensors are, type code and bits."""
    used = [(i, t) for i, t in enumerate(tables.tensor_columns(slot)) if t is not None]
    keys = {id(t): key for key, t in state.items()}
    return [(i, keys.get(id(t)), *_KINDS[t.dtype]) for i, t in used]


def _sizes(slot: Slot) -> list[int]:
    """A row like the table's: how many elements each tensor has."""
    found = [0 if t is None else t.numel() for t in tables.tensor_columns(slot)]
    return found + [0] * (tables.COLUMNS - len(found))


class Repeat:
    """The batches of one step, to be gone over again."""

    def __init__(self, optimizer: Stepping, batches: list[Batch]) -> None:
        self._stated = list(optimizer.state)
        places = {id(p): i for i, p in enumerate(self._stated)}
        self._ledgers = [_Ledger(b, optimizer, places) for b in batches]
        self._params = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
        busy = {id(p) for ledger in self._ledgers for p in ledger.params}
        self._idle = [p for p in self._params if id(p) not in busy]

    @classmethod
    def of(cls, optimizer: Stepping, batches: list[Batch]) -> Repeat | None:
        """For a step just made; None when its like cannot be gone over again."""
        fit = (
            native.module() is not None
            and hasattr(Tensor, "__dlpack_c_exchange_api__")
            and all(b.algorithm is not Algorithm.LAMB and b.guard is None and all(map(_fits, b.slots)) for b in batches)
        )
        return cls(optimizer, batches) if fit else None

    def run(self, optimizer: Stepping, scale: float | Tensor) -> bool:
        """Make the step, and count it; False, and nothing done, when this is no repetition."""
        module = native.module()
        if module is None or not self._same_params(optimizer):
            return False
        every = list(optimizer.state.values())
        states = [ledger.states(every) for ledger in self._ledgers]
        if not all(ledger.renew(mine) for ledger, mine in zip(self._ledgers, states)):
            return False
        numbers = [self._numbers(optimizer, ledger, scale) for ledger in self._ledgers]
        if any(n.momentum and not ledger.has_states for n, ledger in zip(numbers, self._ledgers)):
            return False  # SGD's momentum was switched on: the buffers are still to be made
        for ledger, mine, lowered in zip(self._ledgers, states, numbers):
            ledger.run(module, mine, lowered)
        return True

    def _same_params(self, optimizer: Stepping) -> bool:
        params = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
        return (
            len(params) == len(self._params)
            and len(optimizer.state) == len(self._stated)
            and all(map(is_, params, self._params))
            and all(map(is_, optimizer.state, self._stated))
            and all(p.grad is None for p in self._idle)
        )

    def _numbers(self, optimizer: Stepping, ledger: _Ledger, scale: float | Tensor) -> Lowered:
        group = optimizer.param_groups[ledger.group]
        return optimizer._hyper(group, ledger.step + 1, scale).lowered(ledger.algorithm)


def _fits(slot: Slot) -> bool:
    plain = type(slot.param) in _PLAIN and type(slot.grad) in _PLAIN
    row_major = slot.param.is_contiguous() and slot.grad.is_contiguous()
    return plain and row_major and slot.param.is_cpu and slot.copy is None and slot.owner is None
