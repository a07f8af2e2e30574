"""Exact byte counting: what this rank sends, by operation and group, in the dtype that travels.

    with dsx_comm.count_traffic() as traffic:
        ...
    traffic.sent_bytes()                     # all
    traffic.sent_bytes(op="all_reduce")      # one operation
    traffic.sent_bytes(group=my_group)       # one group

With N ranks: all-reduce of S bytes 2S(N-1)/N; all-gather of output S and reduce-scatter of input S, S(N-1)/N each;
all-to-all the parts for other ranks; broadcast and scatter on the source only; reduce and gather on the others only;
send S; receive and barriers 0; object collectives the pickles and their lengths. An asynchronous call counts when it is
issued. The making of groups, and what a backend sends beyond its calls, are not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .calls import OBSERVERS, Call


@dataclass
class _Sum:
    calls: int = 0
    sent: Fraction = Fraction(0)


class Traffic:
    """Sums over the calls seen so far; readable inside and after the `with` block."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Any], _Sum] = {}
        self._lock = threading.Lock()

    def begin(self, call: Call) -> None:
        """Count a call (observer interface)."""
        with self._lock:
            entry = self._sums.setdefault((call.op, call.group), _Sum())
            entry.calls += 1
            entry.sent += Fraction(call.sent, call.per)

    def end(self, token: Any, call: Call, result: Any, is_async: bool) -> None:
        """Nothing to do at the end of a call."""

    def sent_bytes(self, op: str | None = None, group: Any = None) -> int | float:
        """Bytes this rank sent; `op` and `group` restrict. A float only where 2S(N-1)/N is no whole number."""
        total = sum((s.sent for s in self._select(op, group)), Fraction(0))
        return total.numerator if total.denominator == 1 else float(total)

    def calls(self, op: str | None = None, group: Any = None) -> int:
        """Number of calls; `op` and `group` restrict."""
        return sum(s.calls for s in self._select(op, group))

    def by_op(self) -> dict[str, tuple[int, int | float]]:
        """{operation: (calls, bytes sent)}, sorted by name."""
        names = sorted({op for op, _ in self._sums})
        return {op: (self.calls(op), self.sent_bytes(op)) for op in names}

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            self._sums.clear()

    def _select(self, op: str | None, group: Any) -> list[_Sum]:
        with self._lock:
            items = list(self._sums.items())
        return [s for (o, g), s in items if (op is None or o == op) and (group is None or g == group)]


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the traffic of this process inside the `with` block. Blocks may be nested; each counts for itself."""
    traffic = Traffic()
    OBSERVERS.add(traffic)
    try:
        yield traffic
    finally:
        OBSERVERS.remove(traffic)
