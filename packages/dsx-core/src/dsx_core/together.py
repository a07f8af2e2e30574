"""One protocol for "the same error on all ranks".

Ranks that work side by side have one problem in common: where one fails, the others wait for it in the next collective
for ever, or go on with something else. So ranks do such work together: each does its part, then all exchange whether
it succeeded, and either all go on or all raise the same error, which names the rank that failed.

The second use: ranks compare facts (text by key) before they build something, so that a difference is named instead of
ending in a hang or in wrong numbers. They exchange a hash first. Only if the hashes differ do they exchange facts, and
then only one rank of each kind sends them, so that the messages of a thousand ranks stay small.

Results that only one rank needs go to rank 0, which answers (`through_first`): then no rank but rank 0 receives more
than its own answer. Where they can be put together on the way (`joined_first`), rank 0 receives little too.

This module sends nothing itself: `Together` is given a function that gathers a value of each rank, such as one over
`all_gather_object`. So it works over any process group, over threads in tests, and without torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from .errors import CodedError, first_few

__all__ = ["RanksDifferError", "Together", "some_ranks"]

T = TypeVar("T")

_MAX_KINDS = 4  # ranks of at most so many kinds send their facts
_MAX_RANKS = 8  # ranks in an error


class RanksDifferError(CodedError, ValueError):
    """The ranks were given different models or settings, or one of them failed."""

    code = "DSX301"


class Together:
    """The ranks that do something together. Every method is collective: all ranks call it, in the same order.

    A subclass that has cheaper ways to reach rank 0 overrides `collect`, `deal` and `join`.

    Args:
        gather: gives the values of all ranks, in rank order, on every rank. Collective.
        rank, world_size: this rank, and the number of ranks.
        kinds: classes of errors, each made with one text. An error of one of these classes, or of a class below it,
            becomes that class on all ranks; the last one stands for all other errors.
        differ: class of the error of `agree`.
    """

    def __init__(
        self,
        gather: Callable[[Any], list[Any]],
        rank: int,
        world_size: int,
        kinds: Sequence[type[Exception]] = (RuntimeError,),
        differ: type[Exception] = RanksDifferError,
    ) -> None:
        self.gather, self.rank, self.world_size = gather, rank, world_size
        self.kinds, self.differ = kinds, differ

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on rank 0; an empty list on the others."""
        values = self.gather(value)
        return values if self.rank == 0 else []

    def deal(self, values: Sequence[Any] | None) -> Any:
        """Rank 0 gives a value for each rank (the others None); returns this rank's."""
        return self.gather(values)[0][self.rank]

    def join(self, value: T, joining: Callable[[T, T], T]) -> T | None:
        """The one value that `joining` makes of all ranks' values, two at a time, in rank order, on rank 0; None on
        the others.
        """
        values = self.collect(value)
        return functools.reduce(joining, values) if values else None

    def run(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results. When it fails on one rank, all ranks raise the same error.

        `action` must not be collective: a rank that fails before a collective would leave the others waiting in it.

        Raises:
            one of `kinds`: names the lowest rank that failed, what it was doing and its own words. The failing rank
                has the original error as `__cause__`.
        """
        outcome, failure = self._tried(action)
        outcomes = self.gather(outcome)
        failed = self._first_failure(doing, outcomes)
        if failed is not None:
            kind, words = failed
            raise self.kinds[kind](words) from failure
        return [value for value, _ in outcomes]

    def keep(self, doing: str, action: Callable[[], T]) -> T:
        """Like `run`, but each rank keeps its own result, which is not sent."""
        kept: list[T] = []
        self.run(doing, lambda: kept.append(action()))
        return kept[0]

    def through_first(
        self, doing: str, action: Callable[[], T], answer: Callable[[list[T]], Sequence[Any]], *, answering: str = ""
    ) -> Any:
        """Run `action` on every rank and `answer` on rank 0 with all results; returns this rank's item of the answer.
        When one of the two fails, all ranks raise the same error.

        Neither function may be collective.

        Args:
            answering: what rank 0 does in `answer`, for its error; "": the error has rank 0's words alone.

        Raises:
            one of `kinds`: like `run`.
        """
        outcome, failure = self._tried(action)
        everyone = self.collect(outcome)
        failed = self._first_failure(doing, everyone) if self.rank == 0 else None
        return self._answered(failed, failure, lambda: answer([value for value, _ in everyone]), answering)

    def joined_first(
        self,
        doing: str,
        action: Callable[[], T],
        joining: Callable[[T, T], T],
        answer: Callable[[T], Sequence[Any]],
        *,
        answering: str = "",
    ) -> Any:
        """Like `through_first`, for results that become one on their way to rank 0: `joining` makes one of two, that of
        the lower rank first, and must be associative.
        """
        (value, failed), failure = self._tried(action)
        mine = (value, None if failed is None else (self.rank, failed))

        def both(one: Any, other: Any) -> Any:
            told = one[1] or other[1]
            if told:
                return None, told
            try:
                return joining(one[0], other[0]), None
            except Exception as error:  # noqa: BLE001 - the ranks above wait for what this one has joined
                nonlocal failure
                failure = error
                return None, (self.rank, self._told(error))

        try:
            found: Any = self.join(mine, both)
        except Exception as error:
            if self.rank:
                raise
            failure, found = error, (None, (0, self._told(error)))
        joined, told = found or (None, None)
        failed = None if told is None else self._named(doing, *told)
        return self._answered(failed, failure, lambda: answer(cast(T, joined)), answering)

    def first_for_all(self, doing: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give its result to all ranks, or raise its error on all."""
        return self.through_first("", lambda: None, lambda _: [action()] * self.world_size, answering=doing)

    def _answered(
        self,
        failed: tuple[int, str] | None,
        failure: Exception | None,
        answer: Callable[[], Sequence[Any]],
        answering: str,
    ) -> Any:
        """Give this rank's item of rank 0's answer, or raise. `failed`: on rank 0, what failed on some rank."""
        replies: Sequence[Any] = ()
        if self.rank == 0 and failed is None:
            try:
                replies = answer()
            except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
                failure = error
                kind, words = self._told(error)
                who = f"{answering}: {'rank 0 failed: ' if self.world_size > 1 else ''}" if answering else ""
                failed = (kind, f"{who}{words}")
        given = [(None, failed)] * self.world_size
        if failed is None:  # what many ranks get stays one object, which is sent once
            told = {id(reply): (reply, None) for reply in replies}
            given = [told[id(reply)] for reply in replies]
        reply, failed = self.deal(given if self.rank == 0 else None)
        if failed is not None:
            kind, words = failed
            raise self.kinds[kind](words) from failure
        return reply

    def _tried(self, action: Callable[[], Any]) -> tuple[tuple[Any, tuple[int, str] | None], Exception | None]:
        """This rank's report of the action (its result, or its failure in words), and the error itself."""
        try:
            return (action(), None), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            return (None, self._told(error)), error

    def _first_failure(self, doing: str, outcomes: list[Any]) -> tuple[int, str] | None:
        """The failure of the lowest rank that failed: the index of its kind, and the text of the error."""
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                return self._named(doing, rank, failed)
        return None

    def _named(self, doing: str, rank: int, failed: tuple[int, str]) -> tuple[int, str]:
        """The failure that a rank has reported, in the form in which all ranks raise it."""
        kind, words = failed
        who = f"rank {rank} failed: " if self.world_size > 1 else ""
        return kind, f"{doing}: {who}{words}"

    def agree(self, doing: str, facts: Mapping[str, str]) -> None:
        """Check that all ranks have equal facts. Does nothing, and sends nothing, on one rank.

        Raises:
            `differ`: on every rank. It names what differs and on which ranks, or the rank that failed (`telling`).
        """
        if self.world_size == 1:
            return
        mine = dict(facts)
        digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
        answers = self.gather((digest, None))
        self._raise_failures(doing, answers)
        kinds = _kinds([found for found, _ in answers])
        if len(kinds) == 1:
            return
        told = _differences(self._told_by_kinds(mine, kinds))
        raise self.differ(f"{doing}: the ranks differ in {told}. All ranks have to call it with equal arguments")

    def values(self, value: T, *, within: Sequence[Sequence[int]] = ()) -> list[tuple[T, list[int]]]:
        """The different values that ranks have, each with the ranks that have it; of many different ones the first few.

        The ranks compare a hash of `repr(value)`, and one rank of each kind sends its value.

        Args:
            within: classes of ranks whose values are meant to be equal, where those of other classes are not. The
                values are then those of the first class with different ones; none if there is no such class.
        """
        hashes = self.gather(hashlib.sha256(repr(value).encode()).hexdigest())
        kinds = _kinds(hashes)
        if within:
            classes = (_kinds([hashes[rank] for rank in ranks]) for ranks in within)
            kinds = next(
                (
                    [[ranks[place] for place in kind] for kind in found]
                    for ranks, found in zip(within, classes)
                    if len(found) > 1
                ),
                [],
            )
        return self._told_by_kinds(value, kinds)

    def by_rank(self, value: T, *, within: Sequence[Sequence[int]] = ()) -> list[T | None]:
        """For each rank its value, as far as `values` tells it: ranks of further kinds count as those of the first one,
        and ranks of a class without a difference have None.
        """
        kinds = self.values(value, within=within)
        found: list[T | None] = [None] * self.world_size
        if kinds:
            concerned = next(ranks for ranks in within if kinds[0][1][0] in ranks) if within else range(self.world_size)
            for rank in concerned:
                found[rank] = kinds[0][0]
            for told, ranks in kinds:
                for rank in ranks:
                    found[rank] = told
        return found

    def _told_by_kinds(self, value: T, kinds: list[list[int]]) -> list[tuple[T, list[int]]]:
        told = kinds[:_MAX_KINDS]
        by_rank = self.gather(value if self.rank in [ranks[0] for ranks in told] else None)
        return [(by_rank[ranks[0]], ranks) for ranks in told]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Put around work that comes before `agree` and does not communicate. An error in it makes `agree` raise on
        the other ranks too (collective in that case).
        """
        try:
            yield
        except Exception as error:
            if self.world_size > 1:
                self.gather(("", f"{type(error).__name__}: {error}"))
            raise

    def _told(self, failure: Exception) -> tuple[int, str]:
        """The index of an error's kind and its text, from which the other ranks raise the same error."""
        for index, kind in enumerate(self.kinds):
            if isinstance(failure, kind):
                return index, str(failure)
        return len(self.kinds) - 1, f"{type(failure).__name__}: {failure}"

    def _raise_failures(self, doing: str, answers: list[tuple[str, str | None]]) -> None:
        failed = [(rank, error) for rank, (_, error) in enumerate(answers) if error is not None]
        if failed:
            rank, error = failed[0]
            others = "" if len(failed) == 1 else f" (and so did rank {some_ranks(other for other, _ in failed[1:])})"
            raise self.differ(f"{doing}: rank {rank} failed{others}: {error}")


def _kinds(digests: Sequence[str]) -> list[list[int]]:
    """The ranks of each hash, by the lowest."""
    kinds: dict[str, list[int]] = {}
    for rank, found in enumerate(digests):
        kinds.setdefault(found, []).append(rank)
    return list(kinds.values())


def some_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text: all of a few, else the first ones and how many more there are."""
    return first_few(ranks, _MAX_RANKS)


def _differences(kinds: list[tuple[dict[str, str], list[int]]]) -> str:
    """The keys whose values differ, with the ranks that have each value. `kinds`: facts, and the ranks that have
    them.
    """
    found = []
    for key in dict.fromkeys(key for facts, _ in kinds for key in facts):
        ranks: dict[str, list[int]] = {}
        for facts, members in kinds:
            ranks.setdefault(facts.get(key, "nothing"), []).extend(members)
        if len(ranks) > 1:
            values = "; ".join(f"rank {some_ranks(sorted(who))}: {value}" for value, who in ranks.items())
            found.append(f"{key} ({values})")
    return first_few(found)
