"""The record of a profile: a tree of calls, with one node per module and place it was called from. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Node"]


@dataclass
class Node:
    """A module called from one place. `own_*` are without children; the properties include them.

    Attributes:
        name: attribute path from the model; empty for the model itself.
        kind: class of the module.
        params: parameters of the module and everything in it, shared ones once.
        calls: how often it ran forward; recomputation does not count.
        seconds: time in the forward of it and its children, all calls together.
        own_backward_seconds: time that backward spent among operators of this module alone.
    """

    name: str
    kind: str
    params: int = 0
    calls: int = 0
    seconds: float = 0.0
    own_flops: int = 0
    own_macs: int = 0
    own_backward_flops: int = 0
    own_backward_macs: int = 0
    own_recompute_flops: int = 0
    own_backward_seconds: float = 0.0
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Operations of the forward of the module and its children."""
        return self.own_flops + sum(child.flops for child in self.children.values())

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward of the module and its children."""
        return self.own_macs + sum(child.macs for child in self.children.values())

    @property
    def backward_flops(self) -> int:
        """Operations of the backward of the module and its children, recomputation included."""
        return self.own_backward_flops + sum(child.backward_flops for child in self.children.values())

    @property
    def backward_macs(self) -> int:
        """Multiply-accumulates of the backward of the module and its children, recomputation included."""
        return self.own_backward_macs + sum(child.backward_macs for child in self.children.values())

    @property
    def recompute_flops(self) -> int:
        """The part of `backward_flops` that was a forward done again."""
        return self.own_recompute_flops + sum(child.recompute_flops for child in self.children.values())

    @property
    def backward_seconds(self) -> float:
        """Time that backward spent among operators of the module and its children."""
        return self.own_backward_seconds + sum(child.backward_seconds for child in self.children.values())

    @property
    def own_seconds(self) -> float:
        """Forward time outside the children."""
        return max(0.0, self.seconds - sum(child.seconds for child in self.children.values()))

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """This node and all nodes below it, parents first, with their depth."""
        yield depth, self
        for child in self.children.values():
            yield from child.walk(depth + 1)
