"""The files of a job on many hosts: few files for each rank, and few ranks for each file.

A tensor lies whole in one file, and ZeRO cuts each unit of the model over all ranks. So in files that are filled in the
order of the model, each rank has something in most files: 212 of a model of 70 billion parameters on 1 024 ranks, which
are opened and flushed 143 000 times. But tensors of the same place in each block are held by the same ranks, so they
lie here in one file, whatever its size. With that a rank opens one or two files of weights and one or two of optimizer
states.

Tensors begin at multiples of 1 MiB where their sizes are multiples of it, so that ranks share few blocks of the disk.
What a rank alone knows (its random states) lies in the first file of optimizer states that it writes in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .format import CLIENT, MODEL, OPTIMIZER, TensorSpec
from .plan import FilePlan, numbered_files

__all__ = ["ALIGNMENT", "MOST_FILES", "striped_files"]

ALIGNMENT = 1 << 20
MOST_FILES = 4
"""Files per rank, on average; if ranks open no more in plain files, these stay as they are."""


@dataclass
class _Group:
    """Tensors of one file: those of one set of writers, and small ones of parts of this set."""

    mask: int
    specs: list[TensorSpec] = field(default_factory=list)
    nbytes: int = 0

    def add(self, specs: Sequence[TensorSpec], mask: int) -> None:
        self.specs += specs
        self.nbytes += sum(spec.nbytes for spec in specs)
        self.mask |= mask


def striped_files(
    plain: Mapping[str, Sequence[Sequence[TensorSpec]]],
    specs: Mapping[str, Sequence[TensorSpec]],
    masks: Mapping[int, int],
    steady: Collection[str],
    enough: int,
    ranks: int,
) -> list[FilePlan] | None:
    """The files; None where the plain ones are good enough.

    Args:
        plain: family -> the tensors of each file, in the order of the model.
        specs: family -> its tensors.
        masks: the ranks that write a tensor, as bits, by the `id` of its spec.
        steady: names of tensors that share no file with others.
        enough: bytes from which a set of writers has a file of its own.
        ranks: the number of ranks.
    """
    if _opened([_mask_of(file, masks) for files in plain.values() for file in files]) <= MOST_FILES * ranks:
        return None
    groups = {
        MODEL: [
            *_grouped([spec for spec in specs[MODEL] if spec.name in steady], masks, enough),
            *_grouped([spec for spec in specs[MODEL] if spec.name not in steady], masks, enough),
        ],
        OPTIMIZER: _grouped(specs[OPTIMIZER], masks, enough),
    }
    rest = _put(specs[CLIENT], masks, groups[OPTIMIZER])
    found = [file for f in (MODEL, OPTIMIZER) for file in numbered_files(f, [g.specs for g in groups[f]], ALIGNMENT)]
    return [*found, *(numbered_files(CLIENT, [rest]) if rest else ())]


def _mask_of(specs: Sequence[TensorSpec], masks: Mapping[int, int]) -> int:
    mask = 0
    for one in {masks[id(spec)] for spec in specs}:
        mask |= one
    return mask


def _opened(masks: Sequence[int]) -> int:
    """The number of times that all ranks together open files."""
    return sum(bin(mask).count("1") for mask in masks)


def _grouped(specs: Sequence[TensorSpec], masks: Mapping[int, int], enough: int) -> list[_Group]:
    """Tensors by their writers. Small groups go to the large one with the fewest writers that has all of theirs; what
    is left is joined along the ranks.
    """
    by_mask: dict[int, _Group] = {}
    for spec in specs:
        mask = masks[id(spec)]
        group = by_mask.get(mask)
        if group is None:
            group = by_mask[mask] = _Group(mask)
        group.specs.append(spec)
        group.nbytes += spec.nbytes
    large = sorted((group for group in by_mask.values() if group.nbytes >= enough), key=_writers_of)
    left: list[_Group] = []
    for group in sorted((g for g in by_mask.values() if g.nbytes < enough), key=_first_writer):
        wider = next((other for other in large if group.mask & ~other.mask == 0), None)
        if wider is not None:
            wider.add(group.specs, group.mask)
        elif left and left[-1].nbytes < enough:
            left[-1].add(group.specs, group.mask)
        else:
            left.append(group)
    return sorted([*large, *left], key=_first_writer)


def _writers_of(group: _Group) -> int:
    return bin(group.mask).count("1")


def _first_writer(group: _Group) -> int:
    return (group.mask & -group.mask).bit_length()


def _put(specs: Sequence[TensorSpec], masks: Mapping[int, int], groups: Sequence[_Group]) -> list[TensorSpec]:
    """Put each tensor that one rank alone knows to the group of fewest writers that this rank is of. Returns those for
    which there is no group.
    """
    order, found, left = sorted(groups, key=_writers_of), {}, []
    for spec in specs:
        mask = masks[id(spec)]
        if mask not in found:
            found[mask] = next((group for group in order if group.mask & mask), None)
        group = found[mask]
        if group is None or "/" in spec.name:  # that might be the name of a state
            left.append(spec)
        else:
            group.add([spec], mask)
    return left
