"""Ranks of a large job as arithmetic: what each would tell, send and write in a save, without processes or tensors.

`Job` goes through the messages of a save with the real code of rank 0, and counts.
"""

import pickle
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, product
from random import Random
from typing import Any

from dsx.elasticity.peers import whole_snapshots
from dsx_checkpoint.agreeing import First, Hello
from dsx_checkpoint.announcing import Catalogue, ClientTensor, Holding, Known, stored_name
from dsx_checkpoint.boxes import Box, Region
from dsx_checkpoint.crc import Chunks, crc_of
from dsx_checkpoint.format import CHUNK_BYTES, CLIENT, FAMILIES, Entry, FileEntry, Index, Placed, TensorSpec
from dsx_checkpoint.node_part import NodePart
from dsx_checkpoint.nodes.copies import Layout
from dsx_checkpoint.nodes.finding import Found
from dsx_checkpoint.nodes.repairing import Judge, Looked, shares_of_node
from dsx_checkpoint.nodes.topology import Nodes
from dsx_checkpoint.nodes.transfers import Holders, by_rank, planned_transfers
from dsx_checkpoint.plan import MAX_FILE_BYTES
from dsx_checkpoint.planning import WritePlan
from dsx_checkpoint.reads import Reads
from dsx_checkpoint.registers import Registers
from dsx_checkpoint.spans import Range, Spans, spans_of_region, unpack_ranges
from dsx_comm.object_tree import children_of, packed, parent_of

STATES = (("", ""), ("master", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))
RANDOM = (("python.numbers", "I64", 625), ("torch", "U8", 5056), ("numpy.keys", "I64", 624))
RANKS_PER_HOST = 8


def llama(blocks: int, width: int = 8192, inner: int = 28672, vocabulary: int = 128256) -> list[list[tuple]]:
    """Units of name and shape: with 80 blocks the 723 tensors of a Llama of 70 billion parameters."""
    shapes = {
        "input_norm": (width,), "q": (width, width), "k": (width // 8, width), "v": (width // 8, width),
        "o": (width, width), "post_norm": (width,), "gate": (inner, width), "up": (inner, width),
        "down": (width, inner),
    }  # fmt: skip
    units = [[("embed.weight", (vocabulary, width))]]
    units += [[(f"layers.{i}.{n}.weight", s) for n, s in shapes.items()] for i in range(blocks)]
    return [*units, [("norm.weight", (width,))], [("lm_head.weight", (vocabulary, width))]]


def experts(blocks: int, per_block: int, shape: tuple = (2048, 1024)) -> list[list[tuple]]:
    """Units of many small matrices."""
    return [[(f"layers.{i}.experts.{e}.weight", shape) for e in range(per_block)] for i in range(blocks)]


def numel(shape: tuple) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass
class Job:
    """Ranks that share each unit out evenly, as ZeRO does, and a save of them.

    Attributes:
        units: of each unit the names and shapes of its tensors.
        sent, received: bytes of each rank, those included that it passes on in the tree.
    """

    ranks: int
    units: list[list[tuple]]
    catalogue: Catalogue = field(default_factory=Catalogue)
    sent: Counter = field(default_factory=Counter)
    received: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for unit in self.units:
            for name, shape in unit:
                self.catalogue.known[name] = Known(TensorSpec(name, "BF16", shape), master="F32", aliases=())
        numbers = accumulate(map(len, self.units), initial=0)
        self.ends = [
            (first, list(accumulate(numel(shape) for _, shape in unit))) for first, unit in zip(numbers, self.units)
        ]
        self.names = list(self.catalogue.known)
        self.digest = self.catalogue.digest()
        self.holdings = [self._holding(rank) for rank in range(self.ranks)]
        self.kinds = [(self.digest, holding.digest()) for holding in self.holdings]
        self.parts: dict[int, str] = {}
        self.counts_bytes = True

    def clear(self) -> None:
        """Forget the bytes that were counted."""
        self.sent.clear()
        self.received.clear()

    def _holding(self, rank: int) -> Holding:
        found = Holding(key_sets=[STATES])
        for first, ends in self.ends:
            share = -(-ends[-1] // self.ranks)
            begin, end = min(rank * share, ends[-1]), min((rank + 1) * share, ends[-1])
            place = bisect_right(ends, begin)
            while begin < end:
                start = ends[place - 1] if place else 0
                stop = min(end, ends[place])
                found.rows.extend((first + place, 0, begin - start, stop - start, 0))
                begin, place = stop, place + 1
        found.client += [ClientTensor(f"rank{rank}.random.{n}", dtype, (count,)) for n, dtype, count in RANDOM]
        found.numbered["step"] = array("I", found.rows[::5])
        return found

    # - Messages

    def _up(self, values: list) -> None:
        """Count a value of each rank on its way to rank 0."""
        if not self.counts_bytes:
            return
        frames = [pickle.dumps((value, None)) for value in values]
        for rank in reversed(range(1, len(values))):  # those below it come first
            below = [(rank, rank + 1), *children_of(rank, len(values))]
            end = below[-1][1]
            known: dict[bytes, bytes] = {}
            self._count(rank, parent_of(rank), [known.setdefault(part, part) for part in frames[rank:end]])

    def _count(self, source: int, target: int, value: object) -> None:
        size = len(packed(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))) + 8
        self.sent[source] += size
        self.received[target] += size

    def _down(self, values: list) -> None:
        """Count an answer to each rank."""
        if not self.counts_bytes:
            return
        frames = [pickle.dumps((value, None)) for value in values]
        for rank in range(len(values)):
            for child, end in children_of(rank, len(values)):
                self._count(rank, child, frames[child:end])

    # - A save

    def plan(self, step: int = 1) -> First:
        """Phase 2. The plan is rank 0's, as `dsx_checkpoint.agreeing` makes it."""
        first = First(lambda paths: None, MAX_FILE_BYTES, CHUNK_BYTES)
        hellos = [
            Hello(
                kind,
                {"step": [float(step)] * len(holding.numbered["step"])},
                _rank_state(rank),
                "/checkpoints/step",
                f"host{rank // RANKS_PER_HOST} 0",
                (self.parts[rank],) if rank in self.parts else (),
            )
            for rank, (kind, holding) in enumerate(zip(self.kinds, self.holdings))
        ]
        self._up(hellos)
        replies = first.greet(hellos)
        self._down(replies)
        self.asked = sum(reply.wants_holding for reply in replies)
        if not replies[0].plan:
            details = [
                (self.catalogue if reply.wants_catalogue else None, holding if reply.wants_holding else None)
                for reply, holding in zip(replies, self.holdings)
            ]
            self._up(details)
            replies = first.plan(details)
            self._down(replies)
            self.shares = [reply.share for reply in replies]
        self.parts = {rank: reply.plan for rank, reply in enumerate(replies)}
        return first

    def registers(self) -> Registers:
        """Phase 4: what the ranks send of what they wrote, put together."""
        return self._join([self._registers(rank) for rank in range(self.ranks)], Registers.joined)

    def _registers(self, rank: int) -> Registers:
        """Random registers of the chunks that a rank has parts of."""
        found, random, share = {}, Random(rank), self.shares[rank]
        firsts = iter(share.rows[2::5])
        holding = self.holdings[rank]
        for row in holding.each_row():
            for key, _ in holding.key_sets[row.keys]:
                size, first = 4 if key else 2, next(firsts)
                begin, end = row.start * size // share.chunk_bytes, (row.stop * size - 1) // share.chunk_bytes + 1
                for number in range(begin, end):
                    found[first + number] = found.get(first + number, 0) ^ random.getrandbits(32)
        for _ in holding.client:
            found[next(firsts)] = 1 + rank
        return Registers.of(found)

    # - A load

    def reads(self) -> Reads:
        """What the ranks of a load tell of what they have read, put together; the hashes of the index fit to it."""
        numbers = {(name, key): n for n, (name, (key, _)) in enumerate(product(self.catalogue.known, STATES))}
        specs = {(name, key): TensorSpec(name, dtype or "BF16", known.spec.shape)
                 for name, known in self.catalogue.known.items() for key, dtype in STATES}  # fmt: skip
        whole: dict[int, dict[int, int]] = {}
        everyone = []
        for rank, holding in enumerate(self.holdings):
            random, found = Random(rank), Reads()
            for row, (key, _) in product(holding.each_row(), STATES):
                name = self.names[row.tensor]
                spec, number = specs[name, key], numbers[name, key]
                first, last = (edge * spec.itemsize for edge in (row.start, row.stop))
                registers = {}
                for chunk in range(first // CHUNK_BYTES, -(-last // CHUNK_BYTES)):
                    end = min((chunk + 1) * CHUNK_BYTES, spec.nbytes)
                    if first <= chunk * CHUNK_BYTES and end <= last:
                        continue  # compared by the rank itself
                    registers[chunk] = random.getrandbits(32)
                    sums = whole.setdefault(number, {})
                    sums[chunk] = sums.get(chunk, 0) ^ registers[chunk]
                found.add(number, Region(Box.whole(spec.shape), row.start, row.stop), registers)
            everyone.append(found)
        entries = [
            _entry(specs[name, key], whole.get(numbers[name, key], {}))
            for name, (key, _) in product(self.catalogue.known, STATES)
        ]
        found = self._join(everyone, lambda one, other: Reads.joined(one, other, entries.__getitem__))
        assert found.judge(entries.__getitem__) == [] and not found.wrong
        return found

    def _join(self, values: list, joining: Callable) -> Any:
        """Count values that are put together on their way to rank 0."""
        for rank in reversed(range(self.ranks)):
            for child, _ in children_of(rank, self.ranks):
                values[rank] = joining(values[rank], values[child])
                values[child] = None
            if rank:
                self._count(rank, parent_of(rank), (values[rank], None))
        return values[0]

    # - Snapshots in the nodes' memories

    def restore(self, plan: WritePlan, index: str, lost: int, ranks: int) -> tuple[int, int]:
        """Restore a snapshot of this plan on `ranks` ranks of a job of which a node was lost.

        Returns:
            The bytes that travel, and the number of messages.
        """
        held = self._held(plan)
        if ranks < self.ranks:
            del held[lost]
        now = Job(ranks, self.units) if ranks != self.ranks else self
        nodes = _nodes(ranks)
        bodies = Spans.of((file.name, file.header_bytes, file.size) for file in plan.files)
        lacks = [nodes.leads(rank) and ranks == self.ranks and node == lost for rank, node in enumerate(nodes.of_rank)]
        told = [
            [("step7", held[node], bodies)] if nodes.leads(rank) and not lacks[rank] else []
            for rank, node in enumerate(nodes.of_rank)
        ]
        self._up(told)
        (snapshot,) = whole_snapshots(nodes, told)
        self._down([[replace(snapshot, holders=None)]] * ranks)
        if not snapshot.everywhere:
            texts = (index, [file.start for file in plan.files])
            self._up([(texts if rank == snapshot.teller else None, lacks[rank]) for rank in range(ranks)])
            self._down([texts if lacking else None for lacking in lacks])
        missing = [
            Spans.of(now._slices(plan, rank)) - (Spans() if lacks[nodes.ranks_of(node)[0]] else held[node])
            for rank, node in enumerate(nodes.of_rank)
        ]
        self._up(missing)
        transfers = planned_transfers(nodes, missing, snapshot.holders, "step7")
        self._down(by_rank(nodes, transfers))
        return sum(transfer.nbytes for transfer in transfers), len(transfers)

    def _held(self, plan: WritePlan) -> list[Spans]:
        """What each node holds of a save: what its ranks wrote, and a copy of what those of the node before wrote."""
        nodes = _nodes(self.ranks)
        wrote = [Spans.of([*self._slices(plan, rank), *self._own(plan, rank)]) for rank in range(self.ranks)]
        return [
            Spans.of(
                item
                for kept in (*nodes.ranks_of(node), *nodes.ranks_of((node - 1) % nodes.count))
                for item in wrote[kept]
            )
            for node in range(nodes.count)
        ]

    def _own(self, plan: WritePlan, rank: int) -> Iterator[Range]:
        """The bytes of what a rank alone knows."""
        for client in self.holdings[rank].client:
            yield from spans_of_region(plan.placed[CLIENT][client.name], Region.whole(client.shape))

    def _slices(self, plan: WritePlan, rank: int) -> Iterator[Range]:
        """The bytes of a rank's parameters and states in the files of a plan."""
        holding = self.holdings[rank]
        for row, (key, _) in product(holding.each_row(), STATES):
            family, name = stored_name(key, self.names[row.tensor])
            placed = plan.placed[family][name]
            yield from spans_of_region(placed, Region(Box.whole(placed.spec.shape), row.start, row.stop))

    # - Damage on the disks of the nodes

    def mend(self, plan: WritePlan, harmed: int, harm: Callable[[Spans], Spans]) -> None:
        """Look for damage, and find it. The index, which every rank gets in every load, is not counted.

        Args:
            harmed: the node that has the damage.
            harm: of what it holds, the bytes of which each part of a chunk is damaged.
        """
        nodes, index = _nodes(self.ranks), _hashed(plan)
        headers = Spans.of((name, 0, file.header_bytes) for name, file in index.files.items())
        held = [spans | headers for spans in self._held(plan)]
        bad = harm(held[harmed])
        layout = Layout.of_index(index)

        def sight(node: int, item: Range) -> int:
            wrong = node == harmed and Spans.of([item]) & bad
            return _register(*item) ^ (zlib.crc32(repr(item).encode()) if wrong else 0)

        told = [
            [Found("a", "a", NodePart("", True, 1.0, node, nodes.count, held[node]))] if nodes.leads(rank) else []
            for rank, node in enumerate(nodes.of_rank)
        ]
        self._up(told)
        first, shares = Judge(nodes, layout, Holders.of(dict(enumerate(held)))), {}
        for node, members in enumerate(nodes.members):
            shares |= dict(zip(members, shares_of_node(layout, held[node], len(members)), strict=True))
        seen = [
            Looked.of(layout, [(key, item, sight(node, item)) for key, item in shares[rank]])
            for rank, node in enumerate(nodes.of_rank)
        ]
        asked = first.ask(self._join(seen, partial(Looked.joined, layout=layout)))
        self._down(asked)
        again = [[sight(node, item) for item in unpack_ranges(*ranges)] for node, ranges in zip(nodes.of_rank, asked)]
        self._up(again)
        damage = first.decide(again)
        self._down(first.orders(damage))
        for _ in range(2):  # room is made, and bytes are written
            self._join([None] * self.ranks, lambda one, other: None)
            self._down([None] * self.ranks)
        mended = Spans.of(item for spans in damage.wrong[harmed].values() for item in spans)
        assert damage.nodes == [harmed] and not damage.lost and not bad - mended

    # - Files

    def opened_and_flushed(self) -> list[int]:
        """Of each rank how often it opens or flushes a file of tensors."""
        return [
            len(set(_written_files(share))) + len(share.files if share.flushes is None else share.flushes)
            for share in self.shares
        ]


def _nodes(ranks: int) -> Nodes:
    return Nodes.labelled([str(rank // RANKS_PER_HOST) for rank in range(ranks)])


def _register(file: str, begin: int, end: int) -> int:
    """Of bytes of a file, made up so that those of neighbours are the register of both."""
    return zlib.crc32(b"%s %d" % (file.encode(), begin)) ^ zlib.crc32(b"%s %d" % (file.encode(), end))


def _hashed(plan: WritePlan) -> Index:
    """The index of a save of which all bytes have made-up registers."""

    def chunks(family: str, name: str, placed: Placed) -> Chunks:
        spans = plan.chunks(family, name)
        ends = [[placed.offset + edge for edge in spans.span(number)] for number in range(len(spans))]
        return plan.chunks(family, name, [crc_of(_register(placed.file, *pair), pair[1] - pair[0]) for pair in ends])

    files = {
        file.name: FileEntry(
            file.size, file.header_bytes, crc_of(_register(file.name, 0, file.header_bytes), file.header_bytes)
        )
        for file in plan.files
    }
    tensors = {
        family: {name: Entry(placed, chunks(family, name, placed)) for name, placed in plan.placed[family].items()}
        for family in FAMILIES
    }
    return Index(files, tensors, {}, (), {}, {})


def _entry(spec: TensorSpec, registers: dict[int, int]) -> Entry:
    """A tensor of which these chunks have these registers."""
    spans = Chunks.grid(spec.nbytes, CHUNK_BYTES, ())
    sizes = (stop - start for start, stop in map(spans.span, range(len(spans))))
    crcs = [crc_of(registers.get(number, 0), size) for number, size in enumerate(sizes)]
    return Entry(Placed(spec, "f", 0), Chunks.grid(spec.nbytes, CHUNK_BYTES, crcs))


def _rank_state(rank: int) -> dict:
    """As the engine saves it: random states, of which the tensors are apart."""
    parts = {name: {"__tensor__": f"rank{rank}.random.{name}"} for name, *_ in RANDOM}
    python = {"version": 3, "numbers": parts["python.numbers"], "gauss": None}
    numpy = {"name": "MT19937", "keys": parts["numpy.keys"], "position": 7 * rank % 624, "has_gauss": 0, "gauss": 0.0}
    return {"random": {"python": python, "torch": parts["torch"], "numpy": numpy}, "data": None, "objects": {}}


def _written_files(share) -> list[str]:
    return [share.files[number] for number, writes in zip(share.rows[::5], share.rows[3::5]) if writes]
