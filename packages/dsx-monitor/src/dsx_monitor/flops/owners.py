"""Finds the module that an autograd node belongs to, by the node's sequence number.

Autograd numbers nodes in the order in which a thread creates them. At each change of module in the forward pass the
next number is noted. For any node that runs in backward, its number then tells which module's forward made it. This
needs no hooks on tensors and keeps nothing alive. The nodes of a backward inside a backward (reentrant recomputation)
belong to the thread it runs in; all other nodes belong to the thread that ran the forward.
"""

from __future__ import annotations

import threading
from bisect import bisect_right

import torch

from .tree import Node

__all__ = ["Owners"]


class Owners:
    """Notes at which node numbers the module changes, and finds the owner of a node. One object per profile."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._starts: dict[int, list[int]] = {}
        self._nodes: dict[int, list[Node | None]] = {}

    def note(self, node: Node | None) -> None:
        """Nodes that this thread creates from now on belong to `node` (None: to no module)."""
        thread = threading.get_ident()
        following = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        self._starts.setdefault(thread, []).append(following)
        self._nodes.setdefault(thread, []).append(node)

    def of(self, sequence: int, *, nested: bool) -> Node | None:
        """Owner of the autograd node with this number; `nested`: it runs in a backward inside a backward."""
        thread = threading.get_ident() if nested else self._home
        starts = self._starts.get(thread, [])
        place = bisect_right(starts, sequence)
        return self._nodes[thread][place - 1] if place else None
