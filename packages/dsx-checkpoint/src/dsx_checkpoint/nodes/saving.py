"""A save if each node has its own disk.

Each node's folder gets the bytes that its ranks hold. Replicas are written on every node that holds them, so that at a
load each node finds what it has saved. Bytes that only the ranks of one node hold are then copied to the next node, so
that every byte is on two disks and the loss of one node loses nothing.

    1) make       the lowest rank of each node makes the files at full size, with room for its own bytes only
    2) write      every rank writes its pieces there
    3) copy       bytes that no other node has go to the next node (`transfers.py`), which hashes what comes: a copy
                  is compared with what its rank has held, not with what the disk and the network have made of it
    4) complete   each node writes the index and `node.json` into its unfinished folder
    5) commit     each node renames its folder

All ranks take every step together. When the first folder gets its name, all folders are complete. Older checkpoints are
removed only after all folders have their names, so that at every moment one whole checkpoint is on the disks.

Left out: links to unchanged files of the checkpoint before.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, shown
from ..files import opened, replace_text, write_all
from ..folder import check_target, publish, remove_replaced, saving
from ..format import INDEX_NAME, WEIGHT_MAP_NAME
from ..node_part import NodePart, digest_of_index
from ..parsing import parse_index
from ..plan import Announcement, PieceKey, WritePlan
from ..ranks import Ranks
from ..spans import Spans, spans_of_region
from ..writing import PlannedSave, Written, build_index, write_pieces
from .copies import ChunkKey, Layout, Registers
from .topology import Nodes
from .transfers import Transfer, in_rounds, run_transfers, transfers_between

__all__ = ["NodePlan", "NodeSave"]


@dataclass(frozen=True)
class NodePlan:
    """What lies on which node when a save is over.

    Attributes:
        nodes: which ranks share a disk.
        writers: piece -> the ranks that write it, one on each node that holds it.
        own: per node, what its ranks write: headers, and their pieces.
        copies: per node, what it gets from the node before it.
        copied: piece -> the node that gets a copy of it.
    """

    nodes: Nodes
    writers: Mapping[PieceKey, frozenset[int]]
    own: tuple[Spans, ...]
    copies: tuple[Spans, ...]
    copied: Mapping[PieceKey, int]

    @staticmethod
    def make(plan: WritePlan, announcements: Sequence[Announcement], nodes: Nodes) -> NodePlan:
        """The same on all ranks."""
        holders: dict[PieceKey, dict[int, int]] = {}  # piece -> node -> its lowest rank there
        for rank, announced in enumerate(announcements):
            for key in _pieces(announced):
                family, name, region = key
                if (
                    name not in plan.unlike or plan.writers[family][name][region] == rank
                ):  # else its values do not count
                    holders.setdefault(key, {}).setdefault(nodes.of_rank[rank], rank)
        headers = [(file.name, 0, len(file.header)) for file in plan.files]
        headers += [(WEIGHT_MAP_NAME, 0, len(plan.map_text))] if plan.map_text else []
        own = [[*headers] for _ in range(nodes.count)]
        copies: list[list[tuple[str, int, int]]] = [[] for _ in range(nodes.count)]
        copied: dict[PieceKey, int] = {}
        for key, by_node in holders.items():
            family, name, region = key
            ranges = list(spans_of_region(plan.placed[family][name], region))
            for node in by_node:
                own[node] += ranges
                if len(by_node) == 1 < nodes.count:
                    copied[key] = (node + 1) % nodes.count
                    copies[copied[key]] += ranges
        writers = {key: frozenset(by_node.values()) for key, by_node in holders.items()}
        return NodePlan(nodes, writers, tuple(map(Spans.of, own)), tuple(map(Spans.of, copies)), copied)

    def writes(self, rank: int) -> Callable[[PieceKey], bool]:
        """Whether a rank writes a piece."""
        return lambda key: rank in self.writers.get(key, ())

    def transfers(self) -> list[Transfer]:
        """Every message that brings copies to the next node."""
        nodes = self.nodes
        found = [
            transfer
            for node, spans in enumerate(self.copies)
            for transfer in transfers_between(nodes, (node - 1) % nodes.count, node, spans)
        ]
        return in_rounds(nodes, found)


def check_copies(plan: NodePlan, written: Sequence[Written], came: Sequence[Registers]) -> None:
    """Compare what has come to each node with what the ranks of the node before it have hashed when they wrote it.

    Args:
        written: of each rank, its regions and their registers.
        came: of each rank, the registers of the ranges that it has received.

    Raises:
        CheckpointError: a copy is another one; names the tensor and the node.
    """
    left: list[Registers] = [{} for _ in range(plan.nodes.count)]

    def take(node: int, key: ChunkKey, register: int) -> None:
        left[node][key] = left[node].get(key, 0) ^ register

    for rank, regions in enumerate(written):
        for (family, name), parts in regions.items():
            for region, registers in parts:
                key = (family, name, region)
                if key in plan.copied and rank in plan.writers[key]:
                    for chunk, register in registers.items():
                        take(plan.copied[key], (family, name, chunk), register)
    for rank, registers in enumerate(came):
        for key, register in registers.items():
            take(plan.nodes.of_rank[rank], key, register)
    for node, registers in enumerate(left):
        wrong = next((key for key, register in registers.items() if register), None)
        if wrong is not None:
            raise CheckpointError(
                f"the copy of {shown(wrong[1])} on node {node} is not what was written on the node before it (chunk"
                f" {wrong[2]}): a disk or the network has changed bytes; nothing was saved"
            )


def _pieces(announced: Announcement) -> Iterator[PieceKey]:
    for family, tensors in announced.tensors.items():
        for name, (_, regions) in tensors.items():
            for region in regions:
                yield family, name, region


@dataclass(frozen=True)
class NodeSave(PlannedSave):
    """A planned save that each node carries out on its own disk."""

    on_nodes: NodePlan

    @staticmethod
    def of(planned: PlannedSave, on_nodes: NodePlan) -> NodeSave:
        """The same save over the disks of the nodes."""
        return NodeSave(**vars(planned), on_nodes=on_nodes)

    def run(self, ranks: Ranks) -> Path:
        """See `PlannedSave.run`."""
        plan, here = self.plan, self.on_nodes
        nodes, target, temporary = here.nodes, self.target, self.temporary
        nodes.check_disks(ranks, target.parent)
        with ExitStack() as lock:
            leader: NodeLeader | _Follower = (
                NodeLeader(lock, self, nodes.of_rank[ranks.rank]) if nodes.leads(ranks.rank) else _Follower()
            )
            try:
                ranks.all_or_none(f"making {temporary.name}", leader.make)
                written = ranks.together(
                    f"writing {target.name}",
                    lambda: write_pieces(plan, self.pieces, here.writes(ranks.rank), temporary),
                )
                came = ranks.together(
                    f"copying {target.name} to the next node", lambda: self._copy(ranks, here.transfers(), temporary)
                )

                def build() -> tuple[str, float]:
                    check_copies(here, written, came)
                    return build_index(plan, written, self.state, self.latest).to_json(), time.time()

                built = build if ranks.rank == 0 else lambda: ("", 0.0)
                text, saved_at = ranks.together(f"completing {target.name}", built)[0]
                ranks.all_or_none(f"completing {target.name}", lambda: leader.complete(text, saved_at))
                ranks.all_or_none(f"committing {target.name}", leader.commit)
            except BaseException:
                leader.give_up()
                raise
            ranks.all_or_none(f"removing what {target.name} replaces", leader.clean_up)
        return target

    def _copy(self, ranks: Ranks, transfers: Sequence[Transfer], folder: Path) -> Registers:
        """Send and receive copies; the registers of what has come."""
        layout, found = Layout.of_plan(self.plan), Registers()
        run_transfers(ranks, transfers, folder, lambda item, data: layout.add(found, item, data))
        return found


class _Follower:
    """What other ranks than the lowest of a node do while that one works."""

    def make(self) -> None:
        """Nothing, as in all steps."""

    def complete(self, text: str, saved_at: float) -> None:
        """Nothing."""

    def commit(self) -> None:
        """Nothing."""

    def give_up(self) -> None:
        """Nothing."""

    def clean_up(self) -> None:
        """Nothing."""


class NodeLeader:
    """The steps that the lowest rank of a node does for it."""

    def __init__(self, lock: ExitStack, save: NodeSave, node: int) -> None:
        self._lock, self._save, self._node = lock, save, node
        self._replaced: Path | None = None

    def make(self) -> None:
        """Take the lock of the folder and make the files, with room for what this node will hold."""
        save, plan = self._save, self._save.plan
        self._lock.enter_context(saving(save.target.parent, save.target.name))
        check_target(save.target, latest=save.latest)
        save.temporary.mkdir()
        here = self._spans()
        for file in plan.files:
            create_sparse(save.temporary / file.name, file.header, file.size, here.by_file.get(file.name, ()))
        if plan.map_text:
            size = len(plan.map_text)
            create_sparse(save.temporary / WEIGHT_MAP_NAME, plan.map_text, size, ((0, size),))

    def _spans(self) -> Spans:
        return self._save.on_nodes.own[self._node] | self._save.on_nodes.copies[self._node]

    def complete(self, text: str, saved_at: float) -> None:
        """Write the index and `node.json` into the unfinished folder."""
        save = self._save
        parse_index(text, str(save.target / INDEX_NAME))  # a checkpoint that could not be read is not committed
        replace_text(save.temporary / INDEX_NAME, text)
        NodePart(
            index=digest_of_index(save.temporary), latest=save.latest, saved_at=saved_at, node=self._node,
            nodes=save.on_nodes.nodes.count, spans=self._spans(),
        ).write(save.temporary)  # fmt: skip

    def commit(self) -> None:
        """Give the folder its name."""
        self._replaced = publish(self._save.temporary, self._save.target, latest=self._save.latest)

    def give_up(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._save.temporary, ignore_errors=True)

    def clean_up(self) -> None:
        """All nodes have the new checkpoint: older ones may go."""
        remove_replaced(self._replaced)
        self._save.keeping.remove_others(self._save.target)
        self._lock.close()


def create_sparse(path: Path, header: bytes, size: int, room: Sequence[tuple[int, int]]) -> None:
    """Make a file of full size of which only some ranges take up the disk, so that a full disk shows now."""
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        os.ftruncate(fd, size)
        for begin, end in room:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, begin, end - begin)
        write_all(fd, memoryview(header), 0)
        os.fsync(fd)
