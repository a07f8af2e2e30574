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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsx_core import replace_text

from ..boxes import Region
from ..crc import Chunks
from ..errors import CheckpointError, shown
from ..files import opened, write_all
from ..folder import check_target, publish, remove_replaced
from ..format import INDEX_NAME, WEIGHT_MAP_NAME, Placed
from ..indexing import build_index
from ..node_part import NodePart, digest_of_index
from ..parsing import parse_index
from ..plan import FileStart
from ..planning import Part, WritePlan
from ..ranks import Ranks
from ..registers import Registers, collect_registers
from ..saving_lock import saving
from ..shares import Written
from ..spans import Spans, spans_of_region
from ..writers import Spot
from ..writing import PlannedSave, write_pieces
from .copies import ChunkRegisters, Layout
from .topology import Nodes
from .transfers import Transfer, by_rank, in_rounds, run_transfers, transfers_between

__all__ = ["NodePlan", "NodeSave", "NodeShare"]

Piece = tuple[str, str, Spot]
"""Family, name, and region of the tensor."""


@dataclass(frozen=True)
class NodeShare:
    """A rank's part of what the nodes do.

    Attributes:
        writes: of each of its pieces 1 if it writes it, and 2 if the next node gets a copy of that.
        transfers: the messages that bring copies to the next node, of which it sends or receives.
        placed: the tensors of which it receives copies, with their family and the number of their first chunk.
        files, map_text: to the lowest rank of each node: all files; see `WritePlan`.
        spans: to the lowest rank of each node: what its node will hold.
    """

    writes: bytes
    transfers: tuple[Transfer, ...]
    placed: tuple[tuple[str, Placed, int], ...]
    files: tuple[FileStart, ...] = ()
    map_text: bytes = b""
    spans: Spans = field(default_factory=Spans)


@dataclass(frozen=True)
class NodePlan:
    """The contents of every node when a save is over. Only rank 0 has it.

    Attributes:
        nodes: which ranks share a disk.
        writers: piece -> the ranks that write it, one on each node that holds it.
        own: per node, what its ranks write: headers, and their pieces.
        copies: per node, what it gets from the node before it.
        copied: piece -> the node that gets a copy of it.
    """

    plan: WritePlan
    nodes: Nodes
    writers: Mapping[Piece, Mapping[int, int]]
    own: tuple[Spans, ...]
    copies: tuple[Spans, ...]
    copied: Mapping[Piece, int]

    @staticmethod
    def make(plan: WritePlan, nodes: Nodes) -> NodePlan:
        """From the plan for one disk."""
        holders: dict[Piece, dict[int, int]] = {}  # piece -> node -> its lowest rank there
        regions: dict[Piece, Region] = {}
        for rank, node in enumerate(nodes.of_rank):
            for part in plan.parts(rank):
                if part.name not in plan.unlike or part.writer == rank:  # else its values do not count
                    key = (part.family, part.name, part.spot)
                    holders.setdefault(key, {}).setdefault(node, rank)
                    regions.setdefault(key, plan.region(part))
        headers = [(file.name, 0, file.header_bytes) for file in plan.files]
        headers += [(WEIGHT_MAP_NAME, 0, len(plan.map_text))] if plan.map_text else []
        own = [[*headers] for _ in range(nodes.count)]
        copies: list[list[tuple[str, int, int]]] = [[] for _ in range(nodes.count)]
        copied: dict[Piece, int] = {}
        for key, by_node in holders.items():
            family, name, _ = key
            ranges = list(spans_of_region(plan.placed[family][name], regions[key]))
            for node in by_node:
                own[node] += ranges
                if len(by_node) == 1 < nodes.count:
                    copied[key] = (node + 1) % nodes.count
                    copies[copied[key]] += ranges
        return NodePlan(plan, nodes, holders, tuple(map(Spans.of, own)), tuple(map(Spans.of, copies)), copied)

    def _how_written(self, rank: int, part: Part) -> int:
        """See `NodeShare.writes`."""
        key = (part.family, part.name, part.spot)
        if self.writers.get(key, {}).get(self.nodes.of_rank[rank]) != rank:
            return 0
        return 2 if key in self.copied else 1

    def shares(self) -> list[NodeShare]:
        """The part of each rank."""
        nodes, plan, layout = self.nodes, self.plan, Layout.of_plan(self.plan)
        every_transfer = self.transfers()
        transfers = by_rank(nodes, every_transfer)
        placed: list[dict[tuple[str, str], Placed]] = [{} for _ in nodes.of_rank]
        for transfer in every_transfer:
            for item in transfer.ranges:
                for (family, name, _), *_ in layout.parts(*item):
                    placed[transfer.target][family, name] = plan.placed[family][name]
        files = tuple(file.start for file in plan.files)
        found = []
        for rank, node in enumerate(nodes.of_rank):
            writes = bytes(self._how_written(rank, part) for part in plan.parts(rank))
            tensors = tuple((key[0], one, plan.first_chunks[key]) for key, one in placed[rank].items())
            share = NodeShare(writes, tuple(transfers[rank]), tensors)
            if nodes.leads(rank):
                spans = self.own[node] | self.copies[node]
                share = replace(share, files=files, map_text=plan.map_text, spans=spans)
            found.append(share)
        return found

    def transfers(self) -> list[Transfer]:
        """Every message that brings copies to the next node."""
        nodes = self.nodes
        found = [
            transfer
            for node, spans in enumerate(self.copies)
            for transfer in transfers_between(nodes, (node - 1) % nodes.count, node, spans)
        ]
        return in_rounds(nodes, found)


def check_copies(plan: WritePlan, left: Registers) -> None:
    """Compare what has come to each node with what the ranks of the node before it have hashed when they wrote it.

    Args:
        left: the registers of what was written and of what has come, by node (`_of_node`). Both are put together by xor
            (`registers.py`), so nothing is left of what is equal.

    Raises:
        CheckpointError: a copy is another one; names the tensor and the node.
    """
    for number, _ in left.by_number():
        node, chunk = divmod(number, _NODE)
        (_, name), first = max(
            ((key, first) for key, first in plan.first_chunks.items() if first <= chunk), key=lambda item: item[1]
        )
        raise CheckpointError(
            f"the copy of {shown(name)} on node {node} is not what was written on the node before it (chunk"
            f" {chunk - first}): a disk or the network has changed bytes; nothing was saved"
        )


_NODE = 1 << 40


def _of_node(node: int, registers: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Registers by the numbers of their chunks, as those of one node among those of all nodes."""
    found: dict[int, int] = {}
    for number, register in registers:
        found[node * _NODE + number] = found.get(node * _NODE + number, 0) ^ register
    return found


@dataclass(frozen=True)
class NodeSave(PlannedSave):
    """A planned save that each node carries out on its own disk.

    Attributes:
        nodes: which ranks share a disk.
        share: this rank's part.
        on_nodes: on rank 0 what lies where; None on the others.
    """

    nodes: Nodes
    share: NodeShare
    on_nodes: NodePlan | None

    @staticmethod
    def of(planned: PlannedSave, nodes: Nodes, ranks: Ranks) -> NodeSave:
        """The same save over the disks of the nodes. Collective."""
        made: list[NodePlan] = []

        def deal_out(_: list[None]) -> list[NodeShare]:
            if planned.whole is None:
                raise CheckpointError("rank 0 has no plan of the save")
            made.append(NodePlan.make(planned.whole.plan, nodes))
            return made[0].shares()

        share: NodeShare = ranks.through_first("planning the nodes' parts", lambda: None, deal_out)
        writes = dict(zip(planned.plan.writes, map(bool, share.writes)))
        plan = replace(planned.plan, writes=writes, flushes=None)
        return NodeSave(**{**vars(planned), "plan": plan}, nodes=nodes, share=share, on_nodes=next(iter(made), None))

    def run(self, ranks: Ranks) -> Path:
        """See `PlannedSave.run`."""
        nodes, target, temporary = self.nodes, self.target, self.temporary
        nodes.check_disks(ranks, target.parent)
        with ExitStack() as lock:
            leader: NodeLeader | _Follower = (
                NodeLeader(lock, self, nodes.of_rank[ranks.rank]) if nodes.leads(ranks.rank) else _Follower()
            )
            try:
                ranks.keep(f"making {temporary.name}", leader.make)
                written = ranks.keep(f"writing {target.name}", lambda: write_pieces(self.plan, self.pieces, temporary))
                ranks.joined_first(
                    f"copying {target.name} to the next node",
                    lambda: self._left(written, self._copy(ranks, temporary), ranks.rank),
                    Registers.joined,
                    self._check,
                    answering=f"completing {target.name}",
                )
                text, saved_at = collect_registers(
                    ranks,
                    f"writing {target.name}",
                    self.plan,
                    lambda: written,
                    self._index,
                    answering=f"completing {target.name}",
                )
                ranks.keep(f"completing {target.name}", lambda: leader.complete(text, saved_at))
                ranks.keep(f"committing {target.name}", leader.commit)
            except BaseException:
                leader.give_up()
                raise
            ranks.keep(f"removing what {target.name} replaces", leader.clean_up)
        return target

    def _left(self, written: Written, came: ChunkRegisters, rank: int) -> Registers:
        """Of this rank: the registers of what it wrote for the next node too, and of what has come."""
        node = self.nodes.of_rank[rank]
        pieces = zip(self.plan.writes, self.plan.firsts, self.share.writes)
        mine = [(key, first) for key, first, how in pieces if how == 2]
        sent = ((first + number, value) for key, first in mine for number, value in written[key].items())
        firsts = {(family, placed.spec.name): first for family, placed, first in self.share.placed}
        got = ((firsts[family, name] + number, value) for (family, name, number), value in came.items())
        following = _of_node((node + 1) % self.nodes.count, sent)
        return Registers.joined(Registers.of(following), Registers.of(_of_node(node, got)))

    def _check(self, left: Registers) -> list[None]:
        if self.whole is not None:
            check_copies(self.whole.plan, left)
        return [None] * len(self.nodes.of_rank)

    def _index(self, written: Registers) -> list[tuple[str, float]]:
        """The text of the index and the time, for the lowest rank of each node."""
        if self.whole is None:
            raise CheckpointError("rank 0 has no plan of the save")
        built = build_index(self.whole, written, self.state, self.latest).to_json(), time.time()
        nothing = ("", 0.0)
        return [built if self.nodes.leads(rank) else nothing for rank in range(len(self.nodes.of_rank))]

    def _copy(self, ranks: Ranks, folder: Path) -> ChunkRegisters:
        """Send and receive copies; the registers of what has come."""
        chunk_bytes = self.plan.chunk_bytes
        layout = Layout.of(
            (family, placed, Chunks.grid(placed.spec.nbytes, chunk_bytes, ()))
            for family, placed, _ in self.share.placed
        )
        found: ChunkRegisters = {}
        run_transfers(ranks, self.share.transfers, folder, lambda item, data: layout.add(found, item, data))
        return found


class _Follower:
    """The part of all ranks but a node's lowest, while that one works."""

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
        save, share = self._save, self._save.share
        save.keeping.wait()
        self._lock.enter_context(saving(save.target.parent, save.target.name))
        check_target(save.target, latest=save.latest)
        save.temporary.mkdir()
        for file in share.files:
            room = share.spans.by_file.get(file.name, ())
            create_sparse(save.temporary / file.name, file.header, file.size, room)
        if share.map_text:
            size = len(share.map_text)
            create_sparse(save.temporary / WEIGHT_MAP_NAME, share.map_text, size, ((0, size),))

    def complete(self, text: str, saved_at: float) -> None:
        """Write the index and `node.json` into the unfinished folder."""
        save = self._save
        parse_index(text, str(save.target / INDEX_NAME))  # a checkpoint that could not be read is not committed
        replace_text(save.temporary / INDEX_NAME, text)
        NodePart(
            index=digest_of_index(save.temporary), latest=save.latest, saved_at=saved_at, node=self._node,
            nodes=save.nodes.count, spans=save.share.spans,
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
