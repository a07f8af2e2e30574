"""The index of a checkpoint that was written: the hashes of all ranks put together."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

from ._version import __version__
from .agreeing import WholePlan
from .crc import crc_of
from .format import FAMILIES, WEIGHT_MAP_NAME, Entry, FileEntry, Index
from .planning import WritePlan
from .registers import Registers

__all__ = ["build_index"]


def build_index(whole: WholePlan, written: Registers, state: Any, latest: bool) -> Index:
    """The index of a checkpoint, from the hashes of all ranks."""
    plan = whole.plan
    files = {file.name: FileEntry(file.size, file.header_bytes, zlib.crc32(file.header)) for file in plan.files}
    if plan.map_text:
        length = len(plan.map_text)
        files[WEIGHT_MAP_NAME] = FileEntry(length, length, zlib.crc32(plan.map_text))
    registers = written.dense(plan.chunk_count)
    tensors = {
        family: {name: _entry(plan, family, name, registers) for name in plan.placed[family]} for family in FAMILIES
    }
    return Index(
        files=files,
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


def _entry(plan: WritePlan, family: str, name: str, registers: array[int]) -> Entry:
    """A tensor's place and the hashes of its chunks."""
    chunks, first = plan.chunks(family, name), plan.first_chunks[family, name]
    spans = map(chunks.span, range(len(chunks)))
    values = registers[first : first + len(chunks)]
    crcs = [crc_of(register, stop - start) for register, (start, stop) in zip(values, spans)]
    return Entry(plan.placed[family][name], plan.chunks(family, name, crcs))
