"""The place of each tensor's bytes: files, their headers and the tensors in them. Pure arithmetic.

Files are filled up to a size limit; inside a file tensors are back to back (safetensors allows no holes), wide dtypes
first, so that each element is aligned. Which rank writes what is in `planning.py`, and files of a job on many hosts are
in `striping.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from .format import DTYPES, MODEL, Placed, TensorSpec

MAX_FILE_BYTES = 5 * 10**9
STEADY_BYTES = 16 << 20  # frozen parameters of fewer bytes get no file of their own
_HEADER_BYTES = 64  # a header is filled up to a multiple of this


class FileStart(NamedTuple):
    """A file without its tensors: what a rank needs to make it.

    Attributes:
        text: the header without the spaces that it ends in, which are up to 1 MiB in each of many files.
        header_bytes: its length with them.
        size: of the file.
    """

    name: str
    text: bytes
    header_bytes: int
    size: int

    @staticmethod
    def of(name: str, header: bytes, size: int) -> FileStart:
        """From a file's first bytes."""
        return FileStart(name, header.rstrip(b" "), len(header), size)

    @property
    def header(self) -> bytes:
        """The bytes in front of the tensors."""
        return self.text.ljust(self.header_bytes)


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file: its header (see `FileStart`) and the tensors behind it."""

    name: str
    text: bytes
    header_bytes: int
    tensors: tuple[Placed, ...]
    size: int

    @property
    def start(self) -> FileStart:
        """The file without its tensors."""
        return FileStart(self.name, self.text, self.header_bytes, self.size)

    @property
    def header(self) -> bytes:
        """The bytes in front of the tensors."""
        return self.start.header


def plan_files(
    stem: str, specs: Sequence[TensorSpec], max_bytes: int = MAX_FILE_BYTES, steady: Collection[str] = ()
) -> tuple[FilePlan, ...]:
    """Distribute `specs` over files `<stem>.safetensors` or `<stem>-0000i-of-0000n.safetensors`, as `bins` says."""
    return numbered_files(stem, bins(specs, max_bytes, steady))


def bins(specs: Sequence[TensorSpec], max_bytes: int, steady: Collection[str] = ()) -> list[list[TensorSpec]]:
    """The tensors of each file.

    A tensor larger than `max_bytes` gets a file of its own. No tensors, no file. Tensors named in `steady` come first
    and share no file with others.
    """
    found: list[list[TensorSpec]] = []
    used, before = 0, False
    for spec in sorted(specs, key=lambda spec: spec.name not in steady) if steady else specs:  # stable
        begins, before = before and spec.name not in steady, spec.name in steady
        nbytes = spec.nbytes
        if not found or begins or (used + nbytes > max_bytes and found[-1]):
            found.append([])
            used = 0
        found[-1].append(spec)
        used += nbytes
    return found


def worth_a_file(specs: Mapping[str, TensorSpec], frozen: frozenset[str]) -> frozenset[str]:
    """Frozen parameters, if they are large enough that linking their files saves anything."""
    return frozen if sum(specs[name].nbytes for name in frozen if name in specs) >= STEADY_BYTES else frozenset()


def numbered_files(stem: str, bins: Sequence[Sequence[TensorSpec]], align: int = _HEADER_BYTES) -> tuple[FilePlan, ...]:
    """A file for each of `bins`, named as readers expect it; `align`: see `plan_file`."""
    names = [f"{stem}-{i + 1:05d}-of-{len(bins):05d}" for i in range(len(bins))] if len(bins) > 1 else [stem]
    return tuple(plan_file(f"{name}.safetensors", specs, align) for name, specs in zip(names, bins))


def plan_file(name: str, specs: Sequence[TensorSpec], align: int = _HEADER_BYTES) -> FilePlan:
    """One file with these tensors, wide dtypes first, else in the given order.

    Args:
        align: the first tensor begins at a multiple of this, and so do those that follow it, as far as their sizes are
            multiples of it: these come first.
    """
    by_width: dict[tuple[int, bool], list[TensorSpec]] = {}  # definition order within a width
    for spec in specs:
        order = -DTYPES[spec.dtype][1], align > _HEADER_BYTES and spec.nbytes % align != 0
        known = by_width.get(order)
        if known is None:
            by_width[order] = [spec]
        else:
            known.append(spec)
    ordered = [spec for order in sorted(by_width) for spec in by_width[order]]
    parts, position, offsets, shapes = ['{"__metadata__":{"format":"pt"}'], 0, [], {}
    for spec in ordered:
        end = position + spec.nbytes
        shape = shapes.get(spec.shape)
        if shape is None:
            shape = shapes[spec.shape] = ",".join(map(str, spec.shape))
        quoted = encode_basestring_ascii(spec.name)
        parts.append(f'{quoted}:{{"dtype":"{spec.dtype}","shape":[{shape}],"data_offsets":[{position},{end}]}}')
        offsets.append(position)
        position = end
    text = (",".join(parts) + "}").encode()  # as `json.dumps` writes it, which takes three times as long
    length = len(text) + -(len(text) + (8 if align > _HEADER_BYTES else 0)) % align
    placed = tuple(Placed(s, name, 8 + length + o) for s, o in zip(ordered, offsets))
    return FilePlan(name, length.to_bytes(8, "little") + text, 8 + length, placed, 8 + length + position)


def weight_map(files: Iterable[FilePlan]) -> bytes:
    """The index that Hugging Face reads where weights are split over files; empty where there is one file."""
    model = [plan for plan in files if plan.name.startswith(f"{MODEL}-")]
    tensors = [placed for plan in model for placed in plan.tensors]
    total = sum(placed.spec.nbytes for placed in tensors)
    content = {"metadata": {"total_size": total}, "weight_map": {p.spec.name: p.file for p in tensors}}
    return json.dumps(content, indent=1).encode() if model else b""
