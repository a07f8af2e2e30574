"""Snapshots that survive the loss of a node: each node keeps what its ranks own, and a copy of what another node keeps.

A snapshot is a checkpoint whose bytes are spread over the nodes' memories (`memory.py`). It is planned as every save is
(`dsx_checkpoint.planning`), each rank writes its pieces into the memory of its node, and sends them to one rank of the
next node, which writes them there. So any one node can be lost, and any number of nodes that do not follow each other.

    node 0: a b | copies of e f        node 1: c d | copies of a b        node 2: e f | copies of c d

To restore one, all ranks say what their nodes hold and which bytes they need. What a node lacks is sent by the first
node after it that has it. Then the files on every node have at least the bytes that its ranks read, and the ordinary
load does the rest, hashes included.

Left out: choosing between snapshots and disk, and when to take one (`runtime.py`).
"""

from __future__ import annotations

import dataclasses
import functools
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
from dsx_checkpoint.indexing import build_index
from dsx_checkpoint.loading import OneDisk
from dsx_checkpoint.nodes.topology import Nodes
from dsx_checkpoint.nodes.transfers import Transfer, packs, run_transfers
from dsx_checkpoint.parsing import parse_index
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
        """Of the snapshot: the update and what no other snapshot has, also not another one of the same update."""
        return f"{self.target.name}-{self.temporary.name.rpartition('-')[2]}"

    def run(self, ranks: Processes) -> Path:
        """Write, copy to the next node, commit on every node, remove older snapshots. Collective.

        Raises:
            CheckpointError: the same on all ranks; the snapshot before this one is still there then.
        """
        memory, plan, name, nodes, rank = self.memory, self.plan, self.name, self.nodes, ranks.rank
        leads, doing = nodes.leads(rank), "making a snapshot in memory"
        files: _Files = ranks.through_first(doing, lambda: None, lambda everyone: self._for_leaders(self._files()))
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

    def _files(self) -> _Files:
        """On rank 0: size and first bytes of each file."""
        if self.whole is None:
            raise CheckpointError("rank 0 has no plan of the snapshot")
        plan = self.whole.plan
        texts = {WEIGHT_MAP_NAME: (len(plan.map_text), plan.map_text)} if plan.map_text else {}
        return {**{file.name: (file.size, file.header) for file in plan.files}, **texts}

    def _index(self, written: Registers) -> str:
        """On rank 0: the text of the index."""
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
                ranks.send_object(own.by_file, keeper)
                transfers += [Transfer(rank, keeper, ranges) for ranges in packs(own)]
            elif source != rank:
                spans = Spans(ranks.receive_object(source))
                transfers += [Transfer(source, rank, ranges) for ranges in packs(spans)]
                came |= spans
        run_transfers(ranks, transfers, folder)
        note_held(folder, rank, own | came)


_Files = dict[str, tuple[int, bytes]]
"""Name of a file -> its size, and the bytes at its start."""


def _in_turns(nodes: Nodes, rank: int) -> list[int]:
    """Whose bytes a rank sends or receives, in an order in which no two ranks wait for each other: those of even nodes
    first.
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
    for rank, parts in enumerate(ranks.run("looking for snapshots in memory", look)):
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
    texts = ranks.run("reading the index of a snapshot", lambda: _texts(part) if part and mine else None)
    index_text, headers = texts[teller] or ("", {})
    index = parse_index(index_text, f"the snapshot {name}")

    def prepare() -> None:
        if leads and not (memory.path / name).exists():
            files = {file: (entry.nbytes, headers[file]) for file, entry in index.files.items()}
            memory.finish(memory.make(name, files), name, index_text)

    ranks.keep("making room for a snapshot", prepare)
    own = Spans()
    for folder, held in part.places if part is not None else ():
        own = held if folder.parent == memory.path else own
    wanted = ranks.keep(
        "listing what to read", lambda: _wanted(memory.path / name, index, ranks, module, optimizer, places)
    )
    missing: list[Spans] = ranks.gather(wanted - own)
    transfers = [
        Transfer(source, target, ranges)
        for target, spans in enumerate(missing)
        for source, taken in _servers(spans, target, snapshot, nodes)
        for ranges in packs(taken)
    ]
    mine = [transfer for transfer in transfers if ranks.rank in (transfer.source, transfer.target)]
    source = part or Part(name, ((memory.path / name, Spans()),))
    ranks.keep(
        "fetching a snapshot from other nodes",
        lambda: run_transfers(ranks, mine, memory.path / name, read=functools.partial(_read_ranges, source)),
    )
    came = sum(t.nbytes for t in mine if t.target == ranks.rank and nodes.of_rank[t.source] != here)
    return memory.path / name, came


def _read_ranges(part: Part, ranges: Iterable[Range], into: memoryview) -> None:
    for file, start, stop in ranges:
        into[: stop - start] = part.read(file, start, stop)
        into = into[stop - start :]


def _texts(part: Part) -> tuple[str, dict[str, bytes]]:
    """The index, and the start of each file."""
    text = read_text(part.folder / INDEX_NAME)
    headers = {}
    for name, file in parse_index(text, str(part.folder)).files.items():
        with opened(part.folder / name, os.O_RDONLY) as fd:
            headers[name] = os.pread(fd, file.header_bytes, 0)
    return text, headers


def _servers(missing: Spans, target: int, snapshot: Snapshot, nodes: Nodes) -> Iterator[tuple[int, Spans]]:
    """Who sends what to a rank that misses `missing`. A rank sends itself what its node has in another folder."""
    if not missing:
        return
    here = nodes.of_rank[target]
    for node in (here, *nodes.after(here)):  # its own node may hold it in the folder of an agent that has died
        found = missing & snapshot.held.get(node, Spans())
        members = nodes.ranks_of(node)
        source = members[target % len(members)]
        if found:
            yield source, found
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
