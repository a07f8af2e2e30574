"""Nodes of a cluster on one machine: which test rank stands on which node, and what crosses between them.

`run_ranks` starts ranks on one machine. `Nodes` numbers them as launchers do (rank r is device r % D of node r // D)
and sets the variables by which code learns its place, so that two-level collectives and placements see several nodes.
`Crossing` adds up bytes that were sent inside a node and between nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Crossing", "Nodes"]


@dataclass(frozen=True)
class Nodes:
    """`world` ranks on nodes of `devices` ranks each."""

    world: int
    devices: int

    def __post_init__(self) -> None:
        if self.devices < 1 or self.world % self.devices:
            raise ValueError(f"got {self.world} ranks on nodes of {self.devices}, expected a divisor")

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.world // self.devices

    def node_of(self, rank: int) -> int:
        """The node on which a rank stands."""
        return rank // self.devices

    def device_of(self, rank: int) -> int:
        """The rank's place on its node."""
        return rank % self.devices

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.devices, (node + 1) * self.devices)

    def same_node(self, left: int, right: int) -> bool:
        """Whether two ranks stand on one node."""
        return self.node_of(left) == self.node_of(right)

    @contextmanager
    def environment(self, rank: int) -> Iterator[None]:
        """Inside, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and their like say what a launcher would say on this
        node.
        """
        values = {
            "LOCAL_RANK": self.device_of(rank),
            "LOCAL_WORLD_SIZE": self.devices,
            "LOCAL_SIZE": self.devices,
            "GROUP_RANK": self.node_of(rank),
            "GROUP_WORLD_SIZE": self.count,
            "CROSS_RANK": self.node_of(rank),
            "CROSS_SIZE": self.count,
        }
        before = {name: os.environ.get(name) for name in values}
        os.environ.update({name: str(value) for name, value in values.items()})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@dataclass
class Crossing:
    """Bytes inside nodes and between them."""

    nodes: Nodes
    inside: int = 0
    between: int = 0

    def send(self, source: int, targets: Iterable[int], nbytes: int) -> None:
        """Add `nbytes` sent from a rank to each of `targets`; what a rank sends to itself crosses nothing."""
        for target in targets:
            if target == source:
                continue
            if self.nodes.same_node(source, target):
                self.inside += nbytes
            else:
                self.between += nbytes
