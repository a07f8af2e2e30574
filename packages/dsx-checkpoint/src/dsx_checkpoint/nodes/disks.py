"""Saves and loads over the disks of the nodes, with the interface of `plan_save` and `prepare_load`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..loading import LoadRequest
from ..ranks import Ranks
from ..writing import PlannedSave
from .loading import bring, candidates, mend_copies
from .saving import NodeSave
from .topology import Nodes

__all__ = ["NodeDisks"]


@dataclass(frozen=True)
class NodeDisks:
    """Each node has a disk of its own (`writing.Disks` and `loading.LoadDisks`).

    The ranks that take part must be able to send host memory to each other (`ranks.ranks_of_own`).
    """

    nodes: Nodes
    parts = True

    @staticmethod
    def find(ranks: Ranks) -> NodeDisks:
        """Ask all ranks where they run. Collective."""
        return NodeDisks(Nodes.find(ranks))

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """Raise `CheckpointArgumentError` unless the ranks of each node name one folder."""
        self.nodes.check_folders(call, paths)

    def planned(self, planned: PlannedSave, ranks: Ranks) -> PlannedSave:
        """The save as the nodes carry it out; one node alone saves as if its disk were shared."""
        return planned if self.nodes.count == 1 else NodeSave.of(planned, self.nodes, ranks)

    def candidates(self, root: Path, tag: str | None, ranks: Ranks) -> Iterator[str]:
        """The tags to try. Collective."""
        yield from candidates(self.nodes, root, tag, ranks)

    def make_ready(self, root: Path, name: str, request: LoadRequest, ranks: Ranks) -> None:
        """Bring what this rank needs to its node's disk. Collective."""
        bring(self.nodes, root, name, request, ranks)

    def mend(self, root: Path, name: str, ranks: Ranks) -> bool:
        """Write damaged bytes again from copies on other nodes. Collective."""
        return mend_copies(self.nodes, root, name, ranks)

    def checks(self, ranks: Ranks) -> bool:
        """The lowest rank of each node looks at the files there."""
        return self.nodes.leads(ranks.rank)
