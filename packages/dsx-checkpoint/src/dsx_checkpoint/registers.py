"""The hashes of what the ranks of a save have written, put together on their way to rank 0.

A rank has the register of each chunk that it wrote a part of (`crc.py`). The registers of parts are added by xor, so
ranks that pass on what others send put them together: rank 0 gets each chunk once from each branch of the tree, and not
the parts of all ranks. Chunks are counted through all tensors (`WritePlan.first_chunks`).

Of pieces that several ranks hold, the one rank that writes them sends registers. That all have the same values shows in
one hash per set of ranks that hold the same pieces. Only where such a hash differs do two ranks send one per piece.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import columns
from .announcing import PieceKey
from .errors import CheckpointCorruptError, CheckpointError, shown
from .ranks import Ranks
from .shares import RankPlan, Written

__all__ = ["Registers", "collect_registers", "each_counted"]

_MODULUS = 1 << 64


@dataclass(frozen=True)
class Registers:
    """Registers of chunks, of one rank or of several.

    Attributes:
        numbers: of the chunks, ascending; int64.
        values: the registers; int64. Chunks without a register have the register zero.
        replicas: set of ranks that hold the same pieces, by number -> hash of the values of these pieces -> the lowest
            rank that has it.
    """

    numbers: torch.Tensor
    values: torch.Tensor
    replicas: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    @staticmethod
    def of(items: Mapping[int, int], replicas: Mapping[int, Mapping[int, int]] | None = None) -> Registers:
        """From registers by number."""
        numbers = torch.tensor(sorted(items), dtype=torch.int64, device="cpu")
        return Registers(
            numbers, torch.tensor([items[n] for n in numbers.tolist()], dtype=torch.int64, device="cpu"), replicas or {}
        )

    @staticmethod
    def written(plan: RankPlan, written: Written, rank: int) -> Registers:
        """Those of a rank. Raises `CheckpointCorruptError` if a piece of the plan is missing."""
        missing = next((key for key in plan.writes if key not in written), None)
        if missing is not None:
            raise CheckpointCorruptError(f"{shown(missing[1])}: not everything that was planned has been written")
        sums: dict[int, int] = {}
        for key, holders in zip(plan.writes, plan.holders):
            if holders:
                sums[holders] = (sums.get(holders, 0) + _hash(key, written[key])) % _MODULUS
        replicas = {holders: {value: rank} for holders, value in sums.items()}
        return Registers.of(_added(each_counted(plan, written)), replicas)

    @staticmethod
    def joined(one: Registers, other: Registers) -> Registers:
        """Both; `other` has higher ranks."""
        numbers, order = torch.cat((one.numbers, other.numbers)).sort(stable=True)
        values = torch.cat((one.values, other.values))[order]
        twice = (numbers[1:] == numbers[:-1]).nonzero().squeeze(1)
        values[twice] ^= values[twice + 1]
        values[twice + 1] = 0
        used = values != 0
        replicas = {holders: dict(hashes) for holders, hashes in one.replicas.items()}
        for holders, hashes in other.replicas.items():
            known = replicas.setdefault(holders, {})
            for value, rank in hashes.items():
                known.setdefault(value, rank)
        return Registers(numbers[used], values[used], replicas)

    def by_number(self) -> Iterator[tuple[int, int]]:
        """Numbers and registers."""
        return zip(self.numbers.tolist(), self.values.tolist())

    def dense(self, count: int) -> array[int]:
        """The registers of chunks 0 to count - 1."""
        found = torch.zeros(count, dtype=torch.int64, device="cpu")
        found[self.numbers] = self.values
        return array("I", found.tolist())

    def contradiction(self) -> tuple[int, tuple[int, int]] | None:
        """A set of ranks that do not all have the same values, and the two lowest ranks that differ."""
        for holders, hashes in self.replicas.items():
            if len(hashes) > 1:
                lowest, other, *_ = sorted(hashes.values())
                return holders, (lowest, other)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        starts = torch.ones(len(self.numbers), dtype=torch.bool, device="cpu")
        starts[1:] = self.numbers.diff() != 1
        places = starts.nonzero().squeeze(1)
        runs = torch.stack((self.numbers[places], places), dim=1).flatten()
        values = array("I", self.values.tolist()).tobytes()
        return _restored, (columns.to_bytes(array("q", runs.tolist()), 2), values, dict(self.replicas))


def _restored(runs: bytes, values: bytes, replicas: Mapping[int, Mapping[int, int]]) -> Registers:
    registers, rows = array("I"), columns.from_bytes(runs, 2)
    registers.frombytes(values)
    places = torch.tensor([*rows[1::2], len(registers)], dtype=torch.int64, device="cpu")
    # A run begins at a place of its own: its number there less that place is the same in all of the run.
    shifts = torch.tensor(list(rows[::2]), dtype=torch.int64, device="cpu") - places[:-1]
    numbers = torch.arange(len(registers), device="cpu") + shifts.repeat_interleave(places.diff())
    return Registers(numbers, torch.tensor(list(registers), dtype=torch.int64, device="cpu"), replicas)


def _added(items: Iterator[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, register in items:
        found[number] = found.get(number, 0) ^ register
    return found


def each_counted(plan: RankPlan, written: Written) -> Iterator[tuple[int, int]]:
    """Number and register of the chunks of those pieces in `written` whose registers this rank sends for all."""
    for (key, first), counts in zip(zip(plan.writes, plan.firsts), plan.counts):
        if counts:
            for number, register in written.get(key, {}).items():
                yield first + number, register


def _hash(key: PieceKey, registers: Mapping[int, int]) -> int:
    data = array("I", (value for item in sorted(registers.items()) for value in item))
    text = f"{key!r} ".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text + data.tobytes(), digest_size=8).digest(), "little")


def collect_registers(
    ranks: Ranks,
    doing: str,
    plan: RankPlan,
    write: Callable[[], Written],
    answer: Callable[[Registers], Sequence[Any]],
    *,
    answering: str,
) -> Any:
    """Put the registers of what the ranks write together, and give each rank its own of rank 0's answer. Collective.

    Raises:
        CheckpointError: the same on all ranks: `write` or `answer` failed, or ranks hold different values of elements
            that should be equal.
    """
    kept: list[Written] = []

    def mine() -> Registers:
        kept.append(write())
        return Registers.written(plan, kept[0], ranks.rank)

    def reply(found: Registers) -> Sequence[tuple[int, Any]]:
        wrong = found.contradiction()
        if wrong is None:
            return [(0, given) for given in answer(found)]
        holders, asked = wrong
        return [(holders, rank in asked) for rank in range(ranks.world_size)]

    holders, given = ranks.joined_first(doing, mine, Registers.joined, reply, answering=answering)
    if not holders:
        return given

    def details() -> dict[PieceKey, int]:
        pieces = zip(plan.writes, plan.holders)
        return {key: _hash(key, kept[0][key]) for key, number in pieces if number == holders} if given else {}

    ranks.through_first(doing, details, _name_difference, answering=answering)
    raise CheckpointError(f"{doing}: two ranks have other hashes of all they hold together, and equal ones of each")


def _name_difference(everyone: Sequence[Mapping[PieceKey, int]]) -> Sequence[Any]:
    (owner, known), (rank, other) = [(rank, told) for rank, told in enumerate(everyone) if told]
    for key, value in known.items():
        if other.get(key) != value:
            raise CheckpointError(
                f"{shown(key[1])} has other values on rank {rank} than on rank {owner}, which should hold the "
                "same; if they hold different parts of it by model parallelism, say so with `places`; else the "
                "ranks' models have diverged"
            )
    return [None] * len(everyone)
