"""The ranks that share a disk, or the memory of a machine."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..folder import check_one_folder
from ..ranks import Ranks, host_label, numbered

__all__ = ["Nodes"]


@dataclass(frozen=True)
class Nodes:
    """The ranks that share a disk, or the memory of a machine.

    Attributes:
        of_rank: the node of each rank; nodes are numbered by their lowest ranks.
    """

    of_rank: tuple[int, ...]

    @staticmethod
    def find(ranks: Ranks) -> Nodes:
        """Ask all ranks where they run. Collective. Ranks that one launcher's agent has started on one host share a
        disk.
        """
        return Nodes.labelled(ranks.gather(host_label()))

    @staticmethod
    def labelled(labels: Sequence[str]) -> Nodes:
        """Ranks of one label are on one node."""
        return Nodes(numbered(labels))

    @functools.cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, the lowest first."""
        found: list[list[int]] = [[] for _ in range(max(self.of_rank) + 1)]
        for rank, node in enumerate(self.of_rank):
            found[node].append(rank)
        return tuple(map(tuple, found))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.members)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks of a node, the lowest first."""
        return self.members[node]

    def leads(self, rank: int) -> bool:
        """Whether this is the lowest rank of its node, which makes folders and files there."""
        return self.members[self.of_rank[rank]][0] == rank

    def after(self, node: int) -> list[int]:
        """The other nodes, beginning with the next one."""
        return [(node + distance) % self.count for distance in range(1, self.count)]

    def keeper_of(self, rank: int) -> int | None:
        """The rank of the next node that keeps a copy of what `rank` writes; None on a single node."""
        return None if self.count == 1 else self._keepers[rank]

    def kept_by(self, rank: int) -> tuple[int, ...]:
        """The ranks of the node before of whose bytes `rank` keeps a copy, the lowest first."""
        before = (self.of_rank[rank] - 1) % self.count
        return tuple(other for other in self.members[before] if self.keeper_of(other) == rank)

    @functools.cached_property
    def _keepers(self) -> tuple[int, ...]:
        found = [0] * len(self.of_rank)
        for node, members in enumerate(self.members):
            following = self.members[(node + 1) % self.count]
            for place, rank in enumerate(members):
                found[rank] = following[place % len(following)]
        return tuple(found)

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """Raise `CheckpointArgumentError` unless the ranks of each node name one folder."""
        for node in range(self.count):
            check_one_folder(call, [paths[rank] for rank in self.ranks_of(node)])

    def check_disks(self, ranks: Ranks, folder: Path) -> None:
        """Raise `CheckpointError` where two nodes see one folder. Collective."""
        leads, name = self.leads(ranks.rank), f".probe-{uuid.uuid4().hex}"

        def leave() -> str:
            if leads:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            return name if leads else ""

        def look() -> None:
            me = self.of_rank[ranks.rank]
            for rank, other in enumerate(names):
                if leads and other and self.of_rank[rank] != me and (folder / other).exists():
                    raise CheckpointError(
                        f"checkpoint.use_node_local_storage: nodes {me} and {self.of_rank[rank]} see one folder, "
                        f"{folder}; save to a folder on each node's own disk, or set it to false: a folder that all "
                        "nodes see needs no copies"
                    )

        try:
            names = ranks.run("looking at the nodes' folders", leave)
            ranks.keep("save_checkpoint", look)
        finally:
            (folder / name).unlink(missing_ok=True)
