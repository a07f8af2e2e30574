"""Which module an autograd node belongs to, found by its sequence number.

Autograd numbers nodes in the order in which a thread creates them. Noting the next number at each change of module in
the forward pass therefore tells, for any node that runs in backward, which module's forward made it; no hook on a
tensor is needed and nothing is kept alive. Only a backward inside a backward (reentrant recomputation) has nodes of
the thread it runs in; all others belong to the thread that ran the forward.
"""

from __future__ import annotations

import threading
from bisect import bisect_right

import torch

from .tree import Node

__all__ = ["Owners"]


class Owners:
    """Notes changes of module and answers for nodes. Belongs to one profile."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._starts: dict[int, list[int]] = {}
        self._nodes: dict[int, list[Node | None]] = {}

    def note(self, node: Node | None) -> None:
        """What this thread records from now on belongs to `node` (None: to no module)."""
        thread = threading.get_ident()
        following = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        self._starts.setdefault(thread, []).append(following)
        self._nodes.setdefault(thread, []).append(node)

    def of(self, sequence: int, *, nested: bool) -> Node | None:
        """Owner of the node with that number; `nested`: it runs in a backward inside a backward."""
        thread = threading.get_ident() if nested else self._home
        starts = self._starts.get(thread, [])
        place = bisect_right(starts, sequence)
        return self._nodes[thread][place - 1] if place else None
