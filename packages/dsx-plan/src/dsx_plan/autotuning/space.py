"""The search space: combinations of stage, micro-batch, accumulation and other keys that the configuration leaves open.

How a configuration is read:

* `zero_optimization.stage`: a number is kept, a list is tried, nothing (or "auto" or "all") means all four stages.
* `train_micro_batch_size_per_gpu`: a list is tried as it is; a number, or nothing, is where the search begins, and
  sizes from the section's bounds are tried.
* `train_batch_size`: a number is kept, so that training itself does not change: accumulation follows the micro-batch.
* `gradient_accumulation_steps`: a number is kept, a list is tried, nothing means 1, unless it follows the batch.
* Every other key with a list where one value belongs is tried with each of its values.
* With `fast: false` also the buckets and `overlap_comm`, where the configuration does not say them.

Pure functions; nothing here knows how long anything takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .documents import lists_to_try, value_at, with_values
from .errors import AutotuningError

__all__ = ["Candidate", "Space", "read_space", "without_twins"]

STAGE = "zero_optimization.stage"
TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
STAGES = (0, 1, 2, 3)
_OPEN = (None, "auto", "all")

_REDUCE, _GATHER = "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"
_AHEAD, _OVERLAP = "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.overlap_comm"
BUCKETS = (_REDUCE, _GATHER, _AHEAD)
_BUCKET_SIZES = (50_000_000, 500_000_000, 1_000_000_000)
FURTHER: dict[int, dict[str, tuple[Any, ...]]] = {
    0: {},
    1: {_REDUCE: _BUCKET_SIZES, _GATHER: _BUCKET_SIZES},
    2: {_REDUCE: _BUCKET_SIZES, _GATHER: _BUCKET_SIZES, _OVERLAP: (True, False)},
    3: {_REDUCE: _BUCKET_SIZES, _AHEAD: _BUCKET_SIZES[:2], _OVERLAP: (True, False)},
}
"""Keys that `fast: false` adds for each stage. DeepSpeed also tries `reduce_scatter`, `contiguous_gradients` and
`allgather_partitions`, which have no effect in dsx."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One point of the space.

    Attributes:
        stage: ZeRO stage.
        micro: samples per rank in one forward pass.
        steps: micro-batches per update.
        others: further keys, as (dotted path, JSON text of the value), sorted.
    """

    stage: int
    micro: int
    steps: int
    others: tuple[tuple[str, str], ...] = ()

    @property
    def changes(self) -> dict[str, Any]:
        """Dotted path -> value."""
        further = {path: json.loads(text) for path, text in self.others}
        return {STAGE: self.stage, MICRO: self.micro, STEPS: self.steps, **further}

    @property
    def key(self) -> str:
        """A text that says the same in every run of the tuner."""
        return json.dumps(self.changes, sort_keys=True)

    @property
    def name(self) -> str:
        """A short name for folders and tables; different for different candidates."""
        name = f"z{self.stage}_mbs{self.micro}_gas{self.steps}"
        if not self.others:
            return name
        said = "_".join(_initials(path) + _plain(text) for path, text in self.others)
        return f"{name}_{said[:60]}_{zlib.crc32(self.key.encode()):08x}"

    @property
    def group(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        """The settings that it shares with candidates that differ in batch sizes only."""
        return self.stage, self.others

    def applied_to(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document with this candidate's values. `train_batch_size` goes, unless it is left to another program."""
        changed = with_values(document, self.changes)
        if changed.get(TRAIN) != "auto":
            changed.pop(TRAIN, None)
        return changed

    def harder_than(self, other: Candidate) -> bool:
        """Whether it needs at least the memory that `other` needs: the same with a micro-batch as large or larger."""
        return self.group == other.group and self.micro >= other.micro


def _initials(path: str) -> str:
    return "".join(word[0] for word in path.rpartition(".")[2].split("_") if word)


def _plain(text: str) -> str:
    return "".join(char for char in text if char.isalnum() or char in ".-")


@dataclass(frozen=True)
class Space:
    """The values to combine, and the bounds.

    Attributes:
        stages: ZeRO stages.
        micro: micro-batch sizes, ascending.
        micro_listed: the configuration lists them, so none is left out for being small.
        steps: accumulation steps, ascending; None: they follow from `batches`.
        batches: global batches to keep to; None: the batch may change.
        further: per stage, dotted path -> values.
        data_parallel: ranks that get samples of their own.
        least, most: bounds of the global batch; `most` None: there is none.
        start: where the configuration begins.
    """

    stages: tuple[int, ...]
    micro: tuple[int, ...]
    micro_listed: bool
    steps: tuple[int, ...] | None
    batches: tuple[int, ...] | None
    further: Mapping[int, Mapping[str, tuple[Any, ...]]]
    data_parallel: int
    least: int
    most: int | None
    start: Candidate

    def candidates(self) -> tuple[Candidate, ...]:
        """Every point within the bounds, by stage, then by the order of the configuration's values."""
        found = []
        for stage in self.stages:
            for others in _products(self.further[stage]):
                found += [Candidate(stage, micro, steps, others) for micro, steps in self._batch_sizes()]
        return tuple(dict.fromkeys(found))

    def safest(self) -> Candidate:
        """The point that needs the least memory: the highest stage and the smallest micro-batch."""
        return min(self.candidates(), key=lambda one: (-one.stage, one.micro, one.steps))

    def _batch_sizes(self) -> Iterator[tuple[int, int]]:
        """Pairs of micro-batch and accumulation steps."""
        for micro in self.micro:
            for steps in self.steps if self.steps is not None else self._following(micro):
                batch = micro * steps * self.data_parallel
                kept = self.batches is None or batch in self.batches
                if kept and batch >= self.least and (self.most is None or batch <= self.most):
                    yield micro, steps

    def _following(self, micro: int) -> Iterator[int]:
        for batch in self.batches or ():
            if batch % (micro * self.data_parallel) == 0:
                yield batch // (micro * self.data_parallel)


def _products(further: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[tuple[str, str], ...]]:
    paths = sorted(further)
    for values in itertools.product(*(further[path] for path in paths)):
        yield tuple((path, json.dumps(value, sort_keys=True)) for path, value in zip(paths, values))


def read_space(
    document: Mapping[str, Any],
    section: Any,
    value_type: Callable[[str], Any | None],
    *,
    data_parallel: int,
    from_arguments: Mapping[str, int],
) -> Space:
    """The space that a configuration leaves open.

    Args:
        document: the configuration as it was written.
        section: its validated `autotuning` section.
        value_type: see `lists_to_try`.
        data_parallel: ranks that get samples of their own.
        from_arguments: batch sizes that the script's command line gives, by configuration key.

    Raises:
        AutotuningError: there is nothing to try, or a value is none that can be tried.
    """
    lists = lists_to_try(document, value_type, leave_out=frozenset({"autotuning"}))
    said = {key: _batch_value(document, key, lists, from_arguments) for key in (TRAIN, MICRO, STEPS)}
    stages = _stages(value_at(document, STAGE))
    listed = {path: values for path, values in lists.items() if path not in (STAGE, TRAIN, MICRO, STEPS)}
    for path, values in listed.items():
        if not values:
            raise AutotuningError(f"{path}: got an empty list, expected values to try; write one value or a list")
    batches = said[TRAIN] or None
    steps = said[STEPS] if said[STEPS] and (STEPS in lists or batches is None) else None if batches else (1,)
    micro = _micro_sizes(section, said[MICRO], MICRO in lists, batches, data_parallel)
    space = Space(
        stages=stages,
        micro=micro,
        micro_listed=MICRO in lists,
        steps=steps,
        batches=batches,
        further={stage: {**_further(document, section, stage), **listed} for stage in stages},
        data_parallel=data_parallel,
        least=section.min_train_batch_size,
        most=section.max_train_batch_size,
        start=Candidate(0, 1, 1),
    )
    return _with_start(space, said[MICRO], section)


def _with_start(space: Space, said: tuple[int, ...], section: Any) -> Space:
    """The space with its first point: the configuration's own micro-batch, and first values of lists."""
    found = space.candidates()
    if not found:
        raise AutotuningError(_nothing(space, section))
    wanted = said[0] if said else min(one.micro for one in found)
    stage = space.stages[0] if len(space.stages) == 1 else max(space.stages)
    start = min(
        (one for one in found if one.stage == stage),
        key=lambda one: (abs(one.micro - wanted), found.index(one)),
    )
    return dataclasses.replace(space, start=start)


def _nothing(space: Space, section: Any) -> str:
    bounds = f"at least {space.least}" + ("" if space.most is None else f" and at most {space.most}")
    kept = "" if space.batches is None else f", kept at {', '.join(map(str, space.batches))}"
    return (
        f"autotuning: got no combination of batch sizes for {space.data_parallel} data-parallel ranks; micro-batches"
        f" {', '.join(map(str, space.micro)) or 'none'}, global batch {bounds}{kept}. Change train_batch_size, the"
        " lists, or autotuning.min_/max_train_batch_size and min_/max_train_micro_batch_size_per_gpu"
    )


def _batch_value(
    document: Mapping[str, Any], key: str, lists: Mapping[str, tuple[Any, ...]], from_arguments: Mapping[str, int]
) -> tuple[int, ...]:
    """The values of a batch size: of the document, else of the script's arguments, else none."""
    value = document.get(key)
    given = lists.get(key) or (() if value in _OPEN else (value,))
    if not given and key in from_arguments:
        given = (from_arguments[key],)
    whole: list[Any] = [int(one) if isinstance(one, float) and one.is_integer() else one for one in given]
    for one in whole:
        if isinstance(one, bool) or not isinstance(one, int) or one < 1:
            raise AutotuningError(f"{key}: got {json.dumps(one)}, expected whole numbers of at least 1 to try")
    return tuple(dict.fromkeys(whole))


def _stages(value: Any) -> tuple[int, ...]:
    if value in _OPEN:
        return STAGES
    given = value if isinstance(value, list) else [value]
    if any(one == "all" for one in given):
        return STAGES
    wrong = [one for one in given if isinstance(one, bool) or one not in STAGES]
    if wrong or not given:
        shown = json.dumps(wrong[0]) if wrong else "an empty list"
        raise AutotuningError(f'{STAGE}: got {shown}, expected 0, 1, 2, 3, a list of them, or "all"')
    return tuple(sorted(set(given)))


def _micro_sizes(
    section: Any, said: Sequence[int], listed: bool, batches: Sequence[int] | None, data_parallel: int
) -> tuple[int, ...]:
    least, most = section.min_train_micro_batch_size_per_gpu, section.max_train_micro_batch_size_per_gpu
    if listed:
        sizes: Iterable[int] = said
    elif batches is not None:
        sizes = (size for batch in batches for size in _divisors(batch // data_parallel))
    else:
        sizes = (*_doublings(least, most), *said)
    return tuple(sorted({size for size in sizes if least <= size <= most}))


def _doublings(least: int, most: int) -> Iterator[int]:
    size = least
    while size <= most:
        yield size
        size *= 2


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _further(document: Mapping[str, Any], section: Any, stage: int) -> dict[str, tuple[Any, ...]]:
    if section.fast:
        return {}
    return {path: values for path, values in FURTHER[stage].items() if value_at(document, path) in _OPEN}


def without_twins(candidates: Iterable[Candidate], num_params: int) -> tuple[Candidate, ...]:
    """The candidates without those that cannot differ: buckets larger than the model are all alike."""
    kept: dict[Candidate, Candidate] = {}
    for one in candidates:
        others = tuple((path, _at_most(text, num_params) if path in BUCKETS else text) for path, text in one.others)
        kept.setdefault(Candidate(one.stage, one.micro, one.steps, others), one)
    return tuple(kept.values())


def _at_most(text: str, limit: int) -> str:
    value = json.loads(text)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return json.dumps(min(int(value), limit)) if number else text
