"""Where every tensor's bytes lie: pure arithmetic over names, shapes and dtypes.

All ranks compute the same plan from the same catalogue, so nobody has to be told where to write. Files are filled up
to a size limit; inside a file tensors lie back to back (safetensors allows no holes), wide dtypes first, so that each
element is aligned.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .format import Placed, TensorSpec

MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file: its header and the tensors behind it."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    size: int


def plan_files(stem: str, specs: Sequence[TensorSpec], max_bytes: int = MAX_FILE_BYTES) -> tuple[FilePlan, ...]:
    """Distribute `specs` over files `<stem>.safetensors` or `<stem>-0000i-of-0000n.safetensors`.

    A tensor larger than `max_bytes` gets a file of its own. No tensors, no file.
    """
    bins: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        if not bins or (used + spec.nbytes > max_bytes and bins[-1]):
            bins.append([])
            used = 0
        bins[-1].append(spec)
        used += spec.nbytes
    if len(bins) == 1:
        return (plan_file(f"{stem}.safetensors", bins[0]),)
    return tuple(plan_file(f"{stem}-{i + 1:05d}-of-{len(bins):05d}.safetensors", b) for i, b in enumerate(bins))


def plan_file(name: str, specs: Sequence[TensorSpec]) -> FilePlan:
    """One file with these tensors: wide dtypes first, else in the given order. A plan's own tensors give the same plan again."""
    ordered = sorted(specs, key=lambda s: -s.itemsize)  # stable: definition order within a width
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    offsets = []
    for spec in ordered:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        offsets.append(position)
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple(Placed(s, name, len(header) + o) for s, o in zip(ordered, offsets))
    return FilePlan(name, header, placed, len(header) + position)
