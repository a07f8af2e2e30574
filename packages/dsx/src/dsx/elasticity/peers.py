"""Snapshots that survive the loss of a node: each node keeps what its ranks own, and a copy of what another node keeps.

A snapshot is a checkpoint whose bytes are spread over the nodes' memories (`memory.py`). It is planned as every save is
(`dsx_checkpoint.plan`), each rank writes its pieces into the memory of its node, and sends them to a rank of the next
node, which writes them there. So any one node can be lost, and any number of nodes that do not follow each other.

    node 0: a b | copies of e f        node 1: c d | copies of a b        node 2: e f | copies of c d

To restore one, all ranks say what their nodes hold and which bytes they need. What a node lacks is sent by the first
node after it that has it. Then the files on every node have at least the bytes that its ranks read, and the ordinary
load does the rest, hashes included.

Left out: choosing between snapshots and disk, and when to take one (`runtime.py`).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dsx_checkpoint.boxes import Region
from dsx_checkpoint.encode import decode
from dsx_checkpoint.errors import CheckpointError
from dsx_checkpoint.files import opened, read_text
from dsx_checkpoint.format import DTYPES, INDEX_NAME, WEIGHT_MAP_NAME, Index
from dsx_checkpoint.loading import OneDisk
from dsx_checkpoint.nodes.topology import Nodes
from dsx_checkpoint.parsing import parse_index
from dsx_checkpoint.plan import WritePlan
from dsx_checkpoint.ranks import GroupRanks
from dsx_checkpoint.ranks import Ranks as Processes
from dsx_checkpoint.reading import Reader
from dsx_checkpoint.regions import raw_bytes
from dsx_checkpoint.snapshot import persistent_buffers
from dsx_checkpoint.spans import Range, Spans, spans_of_region
from dsx_checkpoint.writing import PlannedSave, Written, build_index, write_pieces

from .memory import NodeMemory, Part, step_of, write_ranges

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
        """Of the snapshot: the update and what no other snapshot has, also not another one of the same update."""
        return f"{self.target.name}-{self.temporary.name.rpartition('-')[2]}"

    def run(self, ranks: Processes) -> Path:
        """Write, copy to the next node, commit on every node, remove older snapshots. Collective.

        Raises:
            CheckpointError: the same on all ranks; the snapshot before this one is still there then.
        """
        memory, plan, name, rank = self.memory, self.plan, self.name, ranks.rank
        leads = self.nodes.leads(rank)
        made = ranks.together("making a snapshot in memory", lambda: str(self._make()) if leads else "")
        folder = Path(made[self.nodes.ranks_of(self.nodes.of_rank[rank])[0]])
        try:
            told = ranks.together(
                f"writing {name} to memory",
                lambda: (write_pieces(plan, self.pieces, plan.writes(rank), folder), self.state if rank == 0 else None),
            )
            written = [mine for mine, _ in told]
            owned = [owned_spans(plan, mine, number) for number, mine in enumerate(written)]
            self._copy_to_next_node(ranks, folder, owned)
            # Every node has the same index, so that its parts know each other.
            index = build_index(plan, written, told[0][1], latest=True).to_json() if leads else ""
            kept = Spans.of(item for number, spans in enumerate(owned) if self._is_here(number, rank) for item in spans)
            ranks.all_or_none(f"committing {name}", lambda: memory.finish(folder, name, index, kept) if leads else None)
        except BaseException:
            if leads:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        # Only now: had a rank ended before all nodes had the new one, the old one would still be whole.
        if leads:
            memory.keep_only(name)
        return memory.path / name

    def _make(self) -> Path:
        texts = {WEIGHT_MAP_NAME: (len(self.plan.map_text), self.plan.map_text)} if self.plan.map_text else {}
        files = {file.name: (file.size, file.header) for file in self.plan.files}
        return self.memory.make(self.name, {**files, **texts})

    def _is_here(self, writer: int, rank: int) -> bool:
        """Whether what `writer` wrote is on the node of `rank`, as its own or as a copy."""
        node, keeper = self.nodes.of_rank, self.nodes.keeper_of(writer)
        return node[writer] == node[rank] or (keeper is not None and node[keeper] == node[rank])

    def _copy_to_next_node(self, ranks: Processes, folder: Path, owned: Sequence[Spans]) -> None:
        """File by file, so that no more than one file's share of a rank is held twice."""
        if self.nodes.keeper_of(ranks.rank) is None:
            return
        me = Part(self.name, ((folder, owned[ranks.rank]),))
        for file in self.plan.files:
            moves = [
                Move(writer, keeper, file.name, start, stop)
                for writer, spans in enumerate(owned)
                for start, stop in spans.by_file.get(file.name, ())
                if (keeper := self.nodes.keeper_of(writer)) is not None
            ]
            exchange(ranks, moves, me, folder)


def owned_spans(plan: WritePlan, written: Written, rank: int) -> Spans:
    """The bytes that a rank has written."""
    return Spans.of(
        item
        for (family, name), regions in written.items()
        for region, _ in regions
        if plan.writers[family][name][region] == rank
        for item in spans_of_region(plan.placed[family][name], region)
    )


# - Moving bytes


@dataclass(frozen=True)
class Move:
    """Bytes of a file that go from one rank to another."""

    source: int
    target: int
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.stop - self.start


def exchange(ranks: Processes, moves: Sequence[Move], source: Part, folder: Path) -> None:
    """Do all moves: every rank reads what it sends from `source` and writes what comes into `folder`. Collective; the
    list is the same on all ranks.

    Raises:
        CheckpointError: a rank could not read or write; the same on all ranks.
    """
    if not moves:
        return
    if not isinstance(ranks, GroupRanks):
        raise CheckpointError(f"got moves between ranks on {ranks.world_size} rank, expected several")
    mine, world = ranks.rank, range(ranks.world_size)
    sent = {to: [move for move in moves if move.source == mine and move.target == to] for to in world}
    come = {of: [move for move in moves if move.target == mine and move.source == of] for of in world}

    def read() -> torch.Tensor:
        data = bytearray().join(source.read(move.file, move.start, move.stop) for to in world for move in sent[to])
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    outgoing = ranks.all_or_none("reading a snapshot for other nodes", read)
    sizes = [sum(move.nbytes for move in come[of]) for of in world]
    incoming = torch.empty(sum(sizes), dtype=torch.uint8)
    ranks.all_to_all(incoming, outgoing, sizes, [sum(move.nbytes for move in sent[to]) for to in world])

    def write() -> None:
        view, at = raw_bytes(incoming), 0
        for of in world:
            for move in come[of]:
                write_ranges(folder, [(move.file, move.start, view[at : at + move.nbytes])])
                at += move.nbytes

    ranks.all_or_none("writing a snapshot from other nodes", write)


# - Restoring


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of which all bytes are on some node.

    Attributes:
        name: see `Part`.
        held: number of a node -> what it holds.
    """

    name: str
    held: Mapping[int, Spans]

    @property
    def step(self) -> int:
        """Number of the update."""
        return step_of(self.name) or 0


def find_snapshots(ranks: Processes, memory: NodeMemory | None, nodes: Nodes) -> list[Snapshot]:
    """The whole snapshots that all nodes together hold, the newest first. Collective."""
    leads = memory is not None and nodes.leads(ranks.rank)

    def look() -> list[tuple[str, Spans, Spans]]:
        parts = memory.parts() if memory is not None and leads else []
        return [(part.name, part.held, _bodies(part)) for part in parts]

    holders: dict[str, dict[int, Spans]] = {}
    needed: dict[str, Spans] = {}
    for rank, parts in enumerate(ranks.together("looking for snapshots in memory", look)):
        for name, held, bodies in parts:
            holders.setdefault(name, {})[nodes.of_rank[rank]] = held
            needed[name] = bodies
    found = [Snapshot(name, held) for name, held in holders.items() if not needed[name] - _together(held.values())]
    return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.name), reverse=True)


def _together(sets: Iterable[Spans]) -> Spans:
    return Spans.of(item for spans in sets for item in spans)


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
    here, leads = nodes.of_rank[ranks.rank], nodes.leads(ranks.rank)
    name = snapshot.name
    part = next((part for part in memory.parts() if part.name == name), None)
    teller = nodes.ranks_of(min(snapshot.held))[0]
    mine = ranks.rank == teller
    texts = ranks.together("reading the index of a snapshot", lambda: _texts(part) if part and mine else None)
    index_text, headers = texts[teller] or ("", {})
    index = parse_index(index_text, f"the snapshot {name}")

    def prepare() -> None:
        if leads and not (memory.path / name).exists():
            files = {file: (entry.nbytes, headers[file]) for file, entry in index.files.items()}
            memory.finish(memory.make(name, files), name, index_text, Spans())

    ranks.all_or_none("making room for a snapshot", prepare)
    own = Spans()
    for folder, held in part.places if part is not None else ():
        own = held if folder.parent == memory.path else own
    wanted = ranks.all_or_none(
        "listing what to read", lambda: _wanted(memory.path / name, index, ranks, module, optimizer, places)
    )
    missing: list[Spans] = ranks.gather(wanted - own)
    moves = [
        Move(source, target, file, start, stop)
        for target, spans in enumerate(missing)
        for source, file, start, stop in _servers(spans, target, snapshot, nodes)
    ]
    source = part or Part(name, ((memory.path / name, Spans()),))
    for file in index.files:
        exchange(ranks, [move for move in moves if move.file == file], source, memory.path / name)
    came = sum(move.nbytes for move in moves if move.target == ranks.rank and nodes.of_rank[move.source] != here)
    return memory.path / name, came


def _texts(part: Part) -> tuple[str, dict[str, bytes]]:
    """The index, and the start of each file."""
    text = read_text(part.folder / INDEX_NAME)
    headers = {}
    for name, file in parse_index(text, str(part.folder)).files.items():
        with opened(part.folder / name, os.O_RDONLY) as fd:
            headers[name] = os.pread(fd, file.header_bytes, 0)
    return text, headers


def _servers(missing: Spans, target: int, snapshot: Snapshot, nodes: Nodes) -> Iterator[tuple[int, str, int, int]]:
    """Who sends what to a rank that misses `missing`: (rank, file, first byte, behind the last)."""
    here = nodes.of_rank[target]
    for node in (here, *nodes.after(here)):  # its own node may hold it in the folder of an agent that has died
        found = missing & snapshot.held.get(node, Spans())
        members = nodes.ranks_of(node)
        source = members[target % len(members)]
        yield from ((source, *item) for item in found)
        missing = missing - found
    if missing:
        raise CheckpointError(f"snapshot {snapshot.name}: {missing.nbytes} bytes are on no node")


@dataclass(frozen=True)
class NodeFolders(OneDisk):
    """For a load of what `fetch` has brought (`dsx_checkpoint.loading.LoadDisks`): each node has a folder of its own,
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
        return torch.zeros(region.numel, dtype=getattr(torch, DTYPES[placed.spec.dtype][0]))


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
