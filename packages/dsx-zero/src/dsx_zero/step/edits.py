"""Edits of parameters between steps reach the masters, and are the same on all ranks, as freezing is.

A parameter is a normal tensor to its user (C1), so `torch.nn.init.zeros_(layer.weight)` or `weight.mul_(mask)` after
sharding has to last. Where the master has its own memory, `Edits` copies the edit into the master; otherwise the master
would overwrite it at the next step. autograd's version counter tells cheaply that a parameter was written in place.
Writes through `.data` do not raise that counter; sums over the parameter's memory (`MemorySums`) find them. They cost
two passes over all parameters and a wait for the device per step, so that they are taken in the first updates only, and
from then on in programs that have written so (`notice_data_writes`). Only when something was written, the values are
compared with the rounded master. Elements that differ are copied into the master, and the other elements of the master
keep their low bits.

An edit that differs between the ranks (`if rank == 0: ...`, random numbers of different seeds) would give a mixture of
the ranks' values. `EditAgreement` finds it at the step, and names the parameter. It also finds parameters that
only some ranks have frozen.

Edits of partitioned parameters (stage 3) need neither: all ranks write to them together, and into the masters too.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import dsx_comm
import torch
from dsx_core.errors import first_few
from dsx_core.together import some_ranks

from ..errors import ZeroStateError
from ..homes.home import opened, read
from ..params.flat import FlatGroup
from ..params.partitioned_unit import is_partitioned

__all__ = ["EditAgreement", "Edits", "MemorySums"]

_ROW = 64  # words of 8 bytes
_CHUNK = 1 << 9  # rows that stay in the cache of a core between the two sums
_WATCHED = 3  # updates in which writes through `.data` are looked for in every program


class MemorySums:
    """Finds out whether the memory of a tensor was written to since `note`.

    It sums the bits, read as integers, over rows and over columns of 64 words. A changed value changes the sum of its
    row; values that change places change the sums of rows or of columns. This costs one pass over the memory, and one
    byte of sums for each 64 bytes.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        data = tensor.detach().view(-1).view(torch.uint8)
        words = data.numel() // 8 * 8
        whole = words // (8 * _ROW)
        self._rows = data[: whole * 8 * _ROW].view(torch.int64).view(whole, _ROW)
        self._tail = data[whole * 8 * _ROW :]
        self._noted: tuple[torch.Tensor, ...] = ()
        self.note()

    def _sums(self) -> tuple[torch.Tensor, ...]:
        step = _CHUNK if self._rows.device.type == "cpu" else max(1, len(self._rows))
        chunks = self._rows.split(step)
        by_row = torch.cat([chunk.sum(1) for chunk in chunks])
        by_column = torch.stack([chunk.sum(0) for chunk in chunks]).sum(0)
        return by_row, by_column, self._tail.clone()

    def note(self) -> None:
        """Take the present contents as known."""
        self._noted = self._sums()

    def changed(self) -> torch.Tensor:
        """Whether something was written, as a 0-D tensor on the memory's device."""
        return torch.stack([(now != before).any() for now, before in zip(self._sums(), self._noted)]).any()

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that are kept."""
        return sum(sums.nbytes for sums in self._noted)


class Edits:
    """Watches the parameters of resident groups whose masters are memory of their own.

    Args:
        groups: all groups of a model.
        data_writes: whether writes that raise no version counter are looked for. None: in the first updates, and for
            ever if there was such a write in them.
    """

    def __init__(self, groups: Iterable[FlatGroup], *, data_writes: bool | None = None) -> None:
        self._updates_left = _WATCHED if data_writes is None else math.inf if data_writes else 0
        self._shards: set[FlatGroup] = set()
        self._groups = [group for group in groups if self._has_own_master(group)]
        self._seen = {group: _versions(group.parameters) for group in self._groups}
        watched = self._groups if self._updates_left else ()
        # Of whole parameters, not of this rank's shard: all ranks that hold a parameter must go on watching alike.
        self._sums = {group: MemorySums(_memory_of(group)) for group in watched if group.layout.numel}

    def _has_own_master(self, group: FlatGroup) -> bool:
        return group.trainable and not is_partitioned(group) and group.own_master is not None

    @property
    def groups(self) -> Sequence[FlatGroup]:
        """The groups that are watched, and those whose shards were written."""
        return [*self._groups, *self._shards]

    def note_shard(self, group: FlatGroup) -> None:
        """This rank's shard of a partitioned group is written otherwise than by its parameters (a checkpoint is read
        into it).
        """
        self._shards.add(group)

    def take_over(self, groups: Collection[FlatGroup] | None = None) -> None:
        """Copy edits since the last call into the masters: of all groups, or of `groups` only."""
        for group in self._shards if groups is None else self._shards.intersection(groups):
            self._compare(group)
        self._shards = set() if groups is None else self._shards.difference(groups)
        for group in self._written(groups):
            self._compare(group)
            self._note(group)

    def were_written(self, groups: Collection[FlatGroup] | None = None) -> bool:
        """Whether there are edits that `take_over` would bring into the masters."""
        shards = self._shards if groups is None else self._shards.intersection(groups)
        return bool(shards) or bool(self._written(groups))

    def _written(self, groups: Collection[FlatGroup] | None) -> list[FlatGroup]:
        wanted = self._groups if groups is None else [group for group in self._groups if group in groups]
        written = [group for group in wanted if _versions(group.parameters) != self._seen[group]]
        others = [group for group in wanted if group in self._sums and group not in written]
        if others:
            # One transfer from the device for all groups.
            changed = torch.stack([self._sums[group].changed() for group in others]).tolist()
            found = [group for group, was_written in zip(others, changed) if was_written]
            if found:
                self._updates_left = math.inf
            written += found
        return written

    def settle(self) -> None:
        """Say that the optimizer (or a load) has written the parameters from the masters. Their present values do not
        count as edits.
        """
        self._updates_left -= 1
        if self._updates_left <= 0:
            self._sums.clear()
        for group in self._groups:
            self._note(group)

    def nbytes(self) -> int:
        """Bytes that the watching takes."""
        return sum(sums.nbytes for sums in self._sums.values())

    def _note(self, group: FlatGroup) -> None:
        self._seen[group] = _versions(group.parameters)
        if group in self._sums:
            self._sums[group].note()

    def _compare(self, group: FlatGroup) -> None:
        if group.own_master is None:
            return
        with opened(group.own_master) as master:
            visible = read(group.stepped, device=master.device)
            edited = visible != master.to(visible.dtype)
            torch.where(edited, visible.to(master.dtype), master, out=master)


class EditAgreement:
    """Compares over the ranks what users wrote into the parameters of which every rank holds all elements, and which
    parameters they froze.

    One rank may have written where another did not, so that no rank alone knows when to compare. Therefore the
    comparison is part of the words that the ranks exchange in each step anyway. Parameters that only some of the
    ranks hold (experts) are compared among the ranks that hold the same parameters.
    """

    def __init__(self, groups: Iterable[FlatGroup], ranks: dsx_comm.RankSet) -> None:
        self._ranks = ranks
        flat = list(groups)
        named = [(group, name, p) for group in flat for name, p in zip(group.layout.names, group.parameters)]
        held = [(name, p) for group, name, p in named if not is_partitioned(group) and p.numel()]
        trained = [(name, p) for group, name, p in named if group.trainable]
        self._names = [name for name, _ in held]
        self._parameters = [parameter for _, parameter in held]
        self._trained_names = [name for name, _ in trained]
        self._trained = [parameter for _, parameter in trained]
        self._seen = _versions(self._parameters)
        self._of_some = frozenset(name for group, name, _ in named if group.ranks.holders is not ranks.group)
        self._holders = self._find_holders([group.ranks for group in flat]) if self._of_some else []

    def _find_holders(self, sets: Sequence[dsx_comm.RankSet]) -> list[list[int]]:
        """Classes of ranks; the ranks of a class hold the same parameters (collective)."""
        groups = dict.fromkeys(ranks.holders for ranks in sets)
        mine = repr([dsx_comm.get_all_ranks_from_group(group) for group in groups])
        by_rank: list[Any] = [None] * self._ranks.size
        dsx_comm.all_gather_object(by_rank, hashlib.sha256(mine.encode()).digest(), group=self._ranks.group)
        classes: dict[bytes, list[int]] = {}
        for rank, held in enumerate(by_rank):
            classes.setdefault(held, []).append(rank)
        return list(classes.values())

    def _edited(self) -> dict[str, int]:
        """The names of the parameters that were written since `settle`, each with a sum of its bits."""
        now = _versions(self._parameters)
        if now == self._seen:
            return {}
        places = [place for place, (new, old) in enumerate(zip(now, self._seen)) if new != old]
        sums = torch.stack([_sum_of_bits(self._parameters[place]).cpu() for place in places]).tolist()
        return {self._names[place]: value for place, value in zip(places, sums)}

    def _frozen(self) -> dict[str, int]:
        """The names of the parameters that were laid out as trainable and are frozen now."""
        return {name: 1 for name, p in zip(self._trained_names, self._trained) if not p.requires_grad}

    def word(self) -> int:
        """A number that is the same on ranks that wrote and froze the same; 0 where nothing was."""
        changes = [*sorted(self._edited().items()), *sorted(self._frozen().items())]
        if not self._of_some:
            return _hash(changes, 31)
        of_all = [item for item in changes if item[0] not in self._of_some]
        return _hash(of_all, 15) << 16 | _hash([item for item in changes if item[0] in self._of_some], 16)

    def of_all(self) -> str:
        """The edits of the parameters that all ranks hold, as a text; ranks that wrote the same give the same
        text.
        """
        return repr(sorted((name, value) for name, value in self._edited().items() if name not in self._of_some))

    def differ(self, words: Sequence[int]) -> bool:
        """Whether the ranks' words say that ranks changed the same parameters differently."""
        if not self._of_some:
            return len(set(words)) > 1
        of_some = any(len({words[rank] & 0xFFFF for rank in ranks}) > 1 for ranks in self._holders)
        return of_some or len({word >> 16 for word in words}) > 1

    def refuse(self) -> None:
        """Raise an error that says where the ranks' changes differ. Collective.

        Raises:
            ZeroStateError: always, on every rank; names the parameters and the ranks. Nothing has been stepped.
        """
        by_rank = self._changes_of_ranks()
        frozen = self._differing(self._trained_names, [frozen for _, frozen in by_rank])
        if frozen is not None:
            names, ranks = frozen
            raise ZeroStateError(
                f"parameters are frozen on some ranks and trained on others: {names} (requires_grad is False on rank"
                f" {ranks}). Such a parameter would get the gradients of some ranks only; call requires_grad_ with the"
                " same value on every rank"
            )
        names, ranks = self._differing(self._names, [edits for edits, _ in by_rank]) or ("unknown", "unknown")
        raise ZeroStateError(
            f"parameters were written since the last step, and not alike on all ranks: {names} (written on rank"
            f" {ranks}). Every rank has to write the same values (the same seed, the same file), or write"
            " inside `with dsx_zero.GatheredParameters(parameters, modifier_rank=0):` on every rank, which gives rank"
            " 0's values to all"
        )

    def _changes_of_ranks(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        """The parameters that each rank has written and frozen. One rank of each of a few kinds tells it; of further
        kinds, which differ from the first one too, it is taken to be that of the first. Of parameters that some ranks
        hold it is told where ranks with the same parameters differ.
        """
        together = dsx_comm.together(self._ranks.group)
        edited, frozen = self._edited(), self._frozen()

        def part(of_some: bool) -> tuple[dict[str, int], dict[str, int]]:
            def kept(found: dict[str, int]) -> dict[str, int]:
                return {name: value for name, value in found.items() if (name in self._of_some) == of_some}

            return kept(edited), kept(frozen)

        parts = [together.by_rank(part(False))]
        if self._of_some:
            parts.append(together.by_rank(part(True), within=self._holders))
        by_rank: list[tuple[dict[str, int], dict[str, int]]] = []
        for told in zip(*parts):
            edits, froze = dict[str, int](), dict[str, int]()
            for changes in told:
                if changes is not None:
                    edits |= changes[0]
                    froze |= changes[1]
            by_rank.append((edits, froze))
        return by_rank

    def _differing(self, names: Sequence[str], by_rank: Sequence[dict[str, int]]) -> tuple[str, str] | None:
        """The parameters that ranks changed differently, and the ranks that changed them, as texts; None: there are
        none.
        """
        found = [name for name in names if self._differs(name, [changes.get(name) for changes in by_rank])]
        if not found:
            return None
        ranks = [rank for rank, changes in enumerate(by_rank) if any(name in changes for name in found)]
        return first_few(found), some_ranks(ranks)

    def _differs(self, name: str, values: Sequence[int | None]) -> bool:
        if name not in self._of_some:
            return len(set(values)) > 1
        return any(len({values[rank] for rank in ranks}) > 1 for ranks in self._holders)

    def settle(self) -> None:
        """Take the present values of the parameters as known."""
        self._seen = _versions(self._parameters)


def _memory_of(group: FlatGroup) -> torch.Tensor:
    return read(group.stepped) if group.visible is None else group.visible


def _versions(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [parameter._version for parameter in parameters]


def _hash(edited: Sequence[tuple[str, int]], bits: int) -> int:
    """0 where nothing was edited, else a number of `bits` bits."""
    return 0 if not edited else 1 + zlib.crc32(repr(edited).encode()) % (2**bits - 1)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    data = tensor.detach().reshape(-1)
    words = data if data.numel() * data.element_size() % 8 else data.view(torch.int64)
    return words.view(kinds[words.element_size()]).sum(dtype=torch.int64)
