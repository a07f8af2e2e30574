"""The index of a checkpoint that was written: the hashes of all ranks put together on rank 0."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from ._version import __version__
from .agreeing import WholePlan
from .crc import crc_of
from .errors import CheckpointCorruptError, CheckpointError, shown
from .format import FAMILIES, WEIGHT_MAP_NAME, Entry, FileEntry, Index
from .planning import WritePlan
from .shares import ONLY_WRITER, Packed, digest_of, is_incomplete, registers_of, unpack
from .writers import Spot

__all__ = ["build_index"]


def build_index(whole: WholePlan, written: Sequence[Packed], state: Any, latest: bool) -> Index:
    """The index of a checkpoint, from the hashes of all ranks.

    Raises:
        CheckpointError: ranks hold different values of elements that should be equal.
    """
    plan = whole.plan
    headers = {file.name: (file.size, file.header) for file in plan.files}
    if plan.map_text:
        headers[WEIGHT_MAP_NAME] = (len(plan.map_text), plan.map_text)
    registers = _registers(plan, written)
    tensors = {
        family: {name: _entry(plan, family, name, registers) for name in plan.placed[family]} for family in FAMILIES
    }
    return Index(
        files={name: FileEntry(size, len(header), zlib.crc32(header)) for name, (size, header) in headers.items()},
        tensors=tensors,
        aliases=dict(plan.aliases),
        excluded=plan.excluded,
        scalars={key: dict(values) for key, values in whole.numbers.items()},
        state=state,
        ranks=tuple(whole.rank_states),
        latest=latest,
        writer=f"dsx {__version__}",
        chunk_bytes=plan.chunk_bytes,
    )


def _registers(plan: WritePlan, written: Sequence[Packed]) -> array[int]:
    """The registers of all chunks (`WritePlan.first_chunks`), put together from the ranks' pieces."""
    found = array("I", bytes(4 * plan.chunk_count))
    digests: dict[tuple[str, str, Spot], tuple[int, bytes]] = {}
    for rank, packed in enumerate(written):
        firsts, flags = plan.table(rank)
        if any(flag != ONLY_WRITER for flag in flags) or is_incomplete(packed):
            _compare_replicas(plan, rank, packed, digests)
        for number, register in registers_of(packed, firsts, flags):
            found[number] ^= register
    return found


def _compare_replicas(
    plan: WritePlan, rank: int, packed: Packed, digests: dict[tuple[str, str, Spot], tuple[int, bytes]]
) -> None:
    """Compare the pieces that several ranks hold with those of lower ranks, of which `digests` has the hashes."""
    for part, registers in unpack(plan, rank, packed):
        if registers is None:
            raise CheckpointCorruptError(f"{shown(part.name)}: not everything that was planned has been written")
        if part.replicated:
            digest = registers if isinstance(registers, bytes) else digest_of(registers)
            owner, known = digests.setdefault((part.family, part.name, part.spot), (rank, digest))
            if known != digest and part.name not in plan.unlike:
                raise CheckpointError(
                    f"{shown(part.name)} has other values on rank {rank} than on rank {owner}, which should hold the "
                    "same; if they hold different parts of it by model parallelism, say so with `places`; else the "
                    "ranks' models have diverged"
                )


def _entry(plan: WritePlan, family: str, name: str, registers: array[int]) -> Entry:
    """A tensor's place and the hashes of its chunks."""
    chunks, first = plan.chunks(family, name), plan.first_chunks[family, name]
    spans = map(chunks.span, range(len(chunks)))
    values = registers[first : first + len(chunks)]
    crcs = [crc_of(register, stop - start) for register, (start, stop) in zip(values, spans)]
    return Entry(plan.placed[family][name], plan.chunks(family, name, crcs))
