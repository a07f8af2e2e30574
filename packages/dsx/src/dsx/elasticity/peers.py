"""Snapshots that survive the loss of a node: each node keeps what its ranks own, and a copy of what another node keeps.

A snapshot is a checkpoint whose bytes are spread over the nodes' memories (`memory.py`). It is planned as every save is
(`dsx_checkpoint.planning`), each rank writes its pieces into the memory of its node, and sends them to one rank of the
next node, which writes them there. So any one node can be lost, and any number of nodes that do not follow each other.

    node 0: a b | copies of e f        node 1: c d | copies of a b        node 2: e f | copies of c d

To restore one, rank 0 is told what the nodes hold, and which bytes their ranks lack. It tells each rank what to send
and receive: what a node lacks comes from the first node after it that has it. A node without a part gets the index and
the starts of the files. So no other rank hears of more than its own bytes, whatever the number of ranks. Then the files
on every node have at least the bytes that its ranks read, and the ordinary load does the rest, hashes included.

Left out: choosing between snapshots and disk, and when to take one (`runtime.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from dsx_checkpoint.boxes import Region
from dsx_checkpoint.encode import decode
from dsx_checkpoint.errors import CheckpointError
from dsx_checkpoint.files import opened, read_text
from dsx_checkpoint.format import DTYPES, INDEX_NAME, WEIGHT_MAP_NAME, Index
from dsx_checkpoint.indexing import build_index
from dsx_checkpoint.loading import OneDisk
from dsx_checkpoint.nodes.topology import Nodes
from dsx_checkpoint.nodes.transfers import Holders, Transfer, by_rank, packs, planned_transfers, run_transfers
from dsx_checkpoint.parsing import parse_index
from dsx_checkpoint.plan import FileStart
from dsx_checkpoint.ranks import Ranks as Processes
from dsx_checkpoint.reading import Reader
from dsx_checkpoint.registers import Registers, collect_registers
from dsx_checkpoint.shares import RankPlan
from dsx_checkpoint.snapshot import persistent_buffers
from dsx_checkpoint.spans import Range, Spans, spans_of_region
from dsx_checkpoint.writing import PlannedSave, write_pieces

from .memory import NodeMemory, Part, note_held, step_of

__all__ = ["NodeFolders", "PeerSave", "Snapshot", "fetch", "find_snapshots"]


# - Saving


@dataclass(frozen=True)
class PeerSave(PlannedSave):
    """A planned save that goes to the memories of the nodes. `target` and `temporary` only name it."""

    memory: NodeMemory
    nodes: Nodes

    @staticmethod
    def of(planned: PlannedSave, memory: NodeMemory, nodes: Nodes) -> PeerSave:
        """The same save to another place."""
        fields = {field.name: getattr(planned, field.name) for field in dataclasses.fields(PlannedSave)}
        return PeerSave(**fields, memory=memory, nodes=nodes)

    @property
    def name(self) -> str:
        """The name of the snapshot: the update, and an identifier that differs even between snapshots of one update."""
        return f"{self.target.name}-{self.temporary.name.rpartition('-')[2]}"

    def run(self, ranks: Processes) -> Path:
        """Write, copy to the next node, commit on every node, remove older snapshots. Collective.

        Raises:
            CheckpointError: the same on all ranks; the snapshot before this one is still there then.
        """
        memory, plan, name, nodes, rank = self.memory, self.plan, self.name, self.nodes, ranks.rank
        leads, doing = nodes.leads(rank), "making a snapshot in memory"
        files = ranks.through_first(doing, lambda: None, lambda everyone: self._for_leaders(self._files()))
        folder = Path(
            ranks.through_first(
                doing,
                lambda: str(memory.make(name, files)) if leads else "",
                lambda made: [made[nodes.ranks_of(node)[0]] for node in nodes.of_rank],
            )
        )
        try:
            written = ranks.keep(f"writing {name} to memory", lambda: write_pieces(plan, self.pieces, folder))
            ranks.keep(f"copying {name} to the next node", lambda: self._copy_to_next_node(ranks, folder))
            # Every node has the same index, so that its parts know each other.
            index = collect_registers(
                ranks,
                f"writing {name} to memory",
                plan,
                lambda: written,
                lambda registers: self._for_leaders(self._index(registers)),
                answering=f"committing {name}",
            )
            ranks.keep(f"committing {name}", lambda: memory.finish(folder, name, index) if leads else None)
        except BaseException:
            if leads:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        # Only now: had a rank ended before all nodes had the new one, the old one would still be whole.
        if leads:
            memory.keep_only(name)
        return memory.path / name

    def _for_leaders(self, value: Any) -> list[Any]:
        """The value for the first rank of each node, which makes the files there."""
        return [value if self.nodes.leads(rank) else None for rank in range(len(self.nodes.of_rank))]

    def _files(self) -> list[FileStart]:
        """On rank 0: all files."""
        if self.whole is None:
            raise CheckpointError("rank 0 has no plan of the snapshot")
        plan = self.whole.plan
        text = plan.map_text
        return [
            *(file.start for file in plan.files),
            *([FileStart.of(WEIGHT_MAP_NAME, text, len(text))] if text else []),
        ]

    def _index(self, written: Registers) -> str:
        """The text of the index, on rank 0."""
        if self.whole is None:
            raise CheckpointError("rank 0 has no plan of the snapshot")
        return build_index(self.whole, written, self.state, latest=True).to_json()

    def _copy_to_next_node(self, ranks: Processes, folder: Path) -> None:
        """Send what this rank has written to the rank of the next node that keeps a copy, and write what comes from the
        node before; note what this node has then.
        """
        rank, nodes = ranks.rank, self.nodes
        own, keeper = owned_spans(self.plan), nodes.keeper_of(rank)
        came, transfers = Spans(), []
        for source in _in_turns(nodes, rank):
            if source == rank and keeper is not None:
                ranks.send_object(own, keeper)
                transfers += [Transfer(rank, keeper, ranges) for ranges in packs(own)]
            elif source != rank:
                spans: Spans = ranks.receive_object(source)
                transfers += [Transfer(source, rank, ranges) for ranges in packs(spans)]
                came |= spans
        run_transfers(ranks, transfers, folder)
        note_held(folder, rank, own | came)


def _in_turns(nodes: Nodes, rank: int) -> list[int]:
    """The ranks whose bytes a rank sends or receives, in an order in which no two ranks wait for each other: even
    nodes' first.
    """
    sources = () if nodes.count == 1 else (rank, *nodes.kept_by(rank))
    return sorted(sources, key=lambda source: (nodes.of_rank[source] % 2, source))


def owned_spans(plan: RankPlan) -> Spans:
    """The bytes that a rank writes."""
    return Spans.of(
        item
        for (family, name, region), writes in plan.writes.items()
        if writes
        for item in spans_of_region(plan.placed[family, name], region)
    )


# - Restoring


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of which all bytes are on some node.

    Attributes:
        name: see `Part`.
        teller: a rank of a node that has a part of it.
        everywhere: whether all nodes have a part.
        holders: on rank 0, which nodes hold which bytes.
    """

    name: str
    teller: int
    everywhere: bool
    holders: Holders | None = None

    @property
    def step(self) -> int:
        """Number of the update."""
        return step_of(self.name) or 0


Told = Sequence[tuple[str, Spans, Spans]]
"""Of a node's parts of snapshots: name, the bytes that are there, and the bytes that all nodes together should have."""


def find_snapshots(ranks: Processes, memory: NodeMemory | None, nodes: Nodes) -> list[Snapshot]:
    """The whole snapshots that all nodes together hold, the newest first. Collective."""
    leads = memory is not None and nodes.leads(ranks.rank)
    found: list[Snapshot] = []

    def look() -> Told:
        parts = memory.parts() if memory is not None and leads else []
        return [(part.name, part.held, _bodies(part)) for part in parts]

    def answer(everyone: Sequence[Told]) -> list[list[Snapshot]]:
        found.extend(whole_snapshots(nodes, everyone))
        return [[replace(snapshot, holders=None) for snapshot in found]] * ranks.world_size

    snapshots: list[Snapshot] = ranks.through_first("looking for snapshots in memory", look, answer)
    return found or snapshots


def whole_snapshots(nodes: Nodes, everyone: Sequence[Told]) -> list[Snapshot]:
    """Of what each rank tells of its node, the snapshots of which nothing is missing, the newest first. Pure."""
    held: dict[str, dict[int, Spans]] = {}
    needed: dict[str, Spans] = {}
    for rank, parts in enumerate(everyone):
        for name, spans, bodies in parts:
            held.setdefault(name, {})[nodes.of_rank[rank]] = spans
            needed[name] = bodies
    found = []
    for name, by_node in held.items():
        holders = Holders.of(by_node)
        if not needed[name] - holders.spans:
            teller = nodes.ranks_of(min(by_node))[0]
            found.append(Snapshot(name, teller, len(by_node) == nodes.count, holders))
    return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.name), reverse=True)


def _bodies(part: Part) -> Spans:
    """The bytes of all tensors of a snapshot: its files without their headers."""
    index = parse_index(read_text(part.folder / INDEX_NAME), str(part.folder))
    return Spans.of((name, file.header_bytes, file.nbytes) for name, file in index.files.items())


def fetch(
    ranks: Processes, snapshot: Snapshot, memory: NodeMemory, nodes: Nodes, *, module: Any, optimizer: Any, places: Any
) -> tuple[Path, int]:
    """Bring what the ranks of each node will read to that node. Collective.

    Returns:
        The folder of this node's part, and the number of bytes that came from other nodes to this rank.

    Raises:
        CheckpointError: the same on all ranks.
    """
    here, name = nodes.of_rank[ranks.rank], snapshot.name
    folder = memory.path / name
    part = next((part for part in memory.parts() if part.name == name), None)
    _make_folders(ranks, snapshot, memory, part if nodes.leads(ranks.rank) else None, leads=nodes.leads(ranks.rank))

    def look() -> Spans:
        index = parse_index(read_text(folder / INDEX_NAME), str(folder))
        places_of = part.places if part is not None else ()
        own = next((held for place, held in places_of if place == folder), Spans())
        return _wanted(folder, index, ranks, module, optimizer, places) - own

    def answer(missing: Sequence[Spans]) -> list[list[Transfer]]:
        if snapshot.holders is None:
            raise CheckpointError(f"rank 0 does not know what the nodes hold of {name}")
        return by_rank(nodes, planned_transfers(nodes, missing, snapshot.holders, f"snapshot {name}"))

    mine: list[Transfer] = ranks.through_first("listing what to read", look, answer)
    source = part or Part(name, ((folder, Spans()),))
    ranks.keep(
        "fetching a snapshot from other nodes",
        lambda: run_transfers(ranks, mine, folder, read=functools.partial(_read_ranges, source)),
    )
    came = sum(t.nbytes for t in mine if t.target == ranks.rank and nodes.of_rank[t.source] != here)
    return folder, came


def _make_folders(ranks: Processes, snapshot: Snapshot, memory: NodeMemory, part: Part | None, *, leads: bool) -> None:
    """Let every node have a folder of a snapshot with the index and the starts of all files. Collective.

    Args:
        part: to the rank that leads a node, what the node has.
    """
    name, teller = snapshot.name, snapshot.teller
    texts = None
    if not snapshot.everywhere:

        def tell() -> tuple[_Texts | None, bool]:
            return _texts(part) if part is not None and ranks.rank == teller else None, leads and part is None

        def answer(everyone: Sequence[tuple[_Texts | None, bool]]) -> list[_Texts | None]:
            return [everyone[teller][0] if lacks else None for _, lacks in everyone]

        texts = ranks.through_first("reading the index of a snapshot", tell, answer)

    def make() -> None:
        if leads and not (memory.path / name).exists():
            told = texts if part is None else _texts(part)
            if told is None:
                raise CheckpointError(f"rank {teller} has no index of {name} any more")
            memory.finish(memory.make(name, told[1]), name, told[0])

    ranks.keep("making room for a snapshot", make)


def _read_ranges(part: Part, ranges: Iterable[Range], into: memoryview) -> None:
    for file, start, stop in ranges:
        into[: stop - start] = part.read(file, start, stop)
        into = into[stop - start :]


_Texts = tuple[str, list[FileStart]]
"""The index, and the start of each file."""


def _texts(part: Part) -> _Texts:
    text = read_text(part.folder / INDEX_NAME)
    starts = []
    for name, file in parse_index(text, str(part.folder)).files.items():
        with opened(part.folder / name, os.O_RDONLY) as fd:
            starts.append(FileStart.of(name, os.pread(fd, file.header_bytes, 0), file.nbytes))
    return text, starts


@dataclass(frozen=True)
class NodeFolders(OneDisk):
    """The disks of a load of what `fetch` has brought (`dsx_checkpoint.loading.LoadDisks`): a folder for each node,
    with the same index and at least the bytes that its ranks read.
    """

    nodes: Nodes
    parts = True

    def check_folders(self, call: str, paths: Sequence[str]) -> None:
        """Nothing: the folders of two nodes differ, and `fetch` has made each of them."""

    def checks(self, ranks: Processes) -> bool:
        """The first rank of each node looks at the files there."""
        return self.nodes.leads(ranks.rank)


class _Recorder(Reader):
    """Notes what is read, and reads nothing: every answer has the right shape and the value zero."""

    def __init__(self, folder: Path, index: Index, places: Any) -> None:
        super().__init__(folder, index, verify=False, places=places)
        self.noted: list[Range] = []

    def _read_region(self, key: tuple[str, str], region: Region) -> torch.Tensor:
        placed = self.index.tensors[key[0]][key[1]].placed
        self.noted += spans_of_region(placed, region)
        return torch.zeros(region.numel, dtype=getattr(torch, DTYPES[placed.spec.dtype][0]), device="cpu")


def _wanted(folder: Path, index: Index, ranks: Processes, module: Any, optimizer: Any, places: Any) -> Spans:
    """The bytes that this rank will read of a checkpoint: what `prepare_load` asks a reader for."""
    reader = _Recorder(folder, index, places)
    decode(index.state, reader.client)
    if len(index.ranks) == ranks.world_size:
        decode(index.ranks[ranks.rank], reader.client)
    for name, buffer in persistent_buffers(module):
        if reader.has(name):
            reader.buffer(name, tuple(buffer.shape))
    optimizer.read_slices(reader)
    return Spans.of(reader.noted)
