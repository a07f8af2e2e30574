"""Ranks that do something together all succeed, or all raise the same error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from dsx_core import RanksDifferError, Together


class OwnError(ValueError):
    """An error that keeps its class."""


class OtherError(RuntimeError):
    """What all other errors become."""


class _Exchange:
    """Ranks as threads. Counts the values that are no None, which stand for large messages."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, [0] * size
        self._barrier = threading.Barrier(size, timeout=20)
        self._values: list[Any] = [None] * size

    def gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.sent[rank] += value is not None
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return gather


def on_ranks(size: int, work: Callable[[Together], Any]) -> tuple[list[Any], _Exchange]:
    """Result or error of each rank."""
    exchange = _Exchange(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(Together(exchange.gather_of(rank), rank, size, kinds=(OwnError, OtherError)))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, exchange


def test_results_of_all_ranks_come_in_rank_order() -> None:
    found, _ = on_ranks(3, lambda ranks: ranks.run("counting", lambda: ranks.rank * 10))
    assert found == [[0, 10, 20]] * 3
    found, _ = on_ranks(3, lambda ranks: ranks.keep("counting", lambda: ranks.rank * 10))
    assert found == [0, 10, 20]


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (OwnError("the file is damaged"), OwnError, "reading: rank 1 failed: the file is damaged"),
        (KeyError("weight"), OtherError, "reading: rank 1 failed: KeyError: 'weight'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(raised: Exception, kind: type, text: str) -> None:
    def work(ranks: Together) -> Any:
        def action() -> None:
            if ranks.rank >= 1:
                raise raised

        return ranks.run("reading", action)

    found, _ = on_ranks(3, work)
    assert [type(error) for error in found] == [kind] * 3
    assert {str(error) for error in found} == {text}
    assert found[0].__cause__ is None and found[1].__cause__ is raised


def test_one_process_names_no_rank() -> None:
    with pytest.raises(OtherError, match=r"^reading: ZeroDivisionError: division by zero$"):
        Together(lambda value: [value], 0, 1, kinds=(OtherError,)).run("reading", lambda: 1 / 0)


def test_equal_facts_cost_one_exchange_and_one_rank_sends_nothing() -> None:
    found, exchange = on_ranks(4, lambda ranks: ranks.agree("shard()", {"lr": "0.1"}))
    assert found == [None] * 4
    assert exchange.sent == [1] * 4

    def unreachable(value: object) -> list[Any]:
        raise AssertionError("one rank has nobody to ask")

    Together(unreachable, 0, 1).agree("shard()", {"lr": "0.1"})


def test_differing_facts_are_named_with_their_ranks() -> None:
    facts = [{"lr": "0.1", "same": "x"}, {"lr": "0.2", "same": "x"}, {"lr": "0.1", "same": "x"}, {"same": "x"}]
    found, _ = on_ranks(4, lambda ranks: ranks.agree("shard()", facts[ranks.rank]))
    assert {str(error) for error in found} == {
        "shard(): the ranks differ in lr (rank 0, 2: 0.1; rank 1: 0.2; rank 3: nothing). "
        "All ranks have to call it with equal arguments [DSX301] docs: dsx explain DSX301"
    }
    assert all(isinstance(error, RanksDifferError) for error in found)


def test_messages_stay_bounded_where_every_rank_differs() -> None:
    found, exchange = on_ranks(
        24, lambda ranks: ranks.agree("shard()", {f"key {i}": str(ranks.rank) for i in range(9)})
    )
    assert len({str(error) for error in found}) == 1
    assert sum(exchange.sent) == 24 + 4  # one hash of each rank, the facts of four
    assert "and 4 more" in str(found[0])
    assert len(str(found[0])) < 500


def test_of_equal_values_one_rank_sends_them() -> None:
    found, exchange = on_ranks(20, lambda ranks: ranks.values({"a": ranks.rank % 3}))
    assert found == [[({"a": kind}, list(range(kind, 20, 3))) for kind in range(3)]] * 20
    assert sum(exchange.sent) == 20 + 3
    found, exchange = on_ranks(20, lambda ranks: ranks.values(ranks.rank))
    assert found == [[(kind, [kind]) for kind in range(4)]] * 20 and sum(exchange.sent) == 20 + 4


def test_values_are_compared_within_classes_of_ranks() -> None:
    classes = [list(range(rank, 20, 2)) for rank in range(2)]
    found, exchange = on_ranks(20, lambda ranks: ranks.values(ranks.rank % 2, within=classes))
    assert found == [[]] * 20 and sum(exchange.sent) == 20
    found, exchange = on_ranks(
        20, lambda ranks: ranks.values(7 if ranks.rank == 13 else ranks.rank % 2, within=classes)
    )
    assert found == [[(1, [rank for rank in classes[1] if rank != 13]), (7, [13])]] * 20
    assert sum(exchange.sent) == 20 + 2


def test_what_a_few_kinds_tell_stands_for_all_ranks() -> None:
    found, _ = on_ranks(6, lambda ranks: ranks.by_rank(ranks.rank % 2))
    assert found == [[0, 1, 0, 1, 0, 1]] * 6
    found, _ = on_ranks(6, lambda ranks: ranks.by_rank(ranks.rank))  # of more than four kinds as the first one
    assert found == [[0, 1, 2, 3, 0, 0]] * 6
    found, _ = on_ranks(6, lambda ranks: ranks.by_rank(9 if ranks.rank == 3 else 5, within=[[0, 2, 4], [1, 3, 5]]))
    assert found == [[None, 5, None, 9, None, 5]] * 6


def test_results_are_joined_on_their_way_to_rank_0() -> None:
    found, _ = on_ranks(
        5, lambda ranks: ranks.joined_first("", lambda: str(ranks.rank), str.__add__, lambda all_: [all_] * 5)
    )
    assert found == ["01234"] * 5

    def fails(ranks: Together) -> Any:
        return ranks.joined_first("joining", lambda: 1 // (ranks.rank % 3 - 1), max, lambda most: [most] * 5)

    found, _ = on_ranks(5, fails)
    assert {str(error) for error in found} == {
        "joining: rank 1 failed: ZeroDivisionError: integer division or modulo by zero"
    }
    assert all(type(error) is OtherError for error in found)


def test_all_ranks_raise_where_two_results_cannot_be_joined() -> None:
    def unlike(one: int, other: int) -> int:
        if other == 3:
            raise LookupError("no place")
        return one + other

    found, _ = on_ranks(
        5, lambda ranks: ranks.joined_first("joining", lambda: ranks.rank, unlike, lambda all_: [all_] * 5)
    )
    assert len({str(error) for error in found}) == 1 and "failed: LookupError: no place" in str(found[0])
    assert all(type(error) is OtherError for error in found)


def test_a_rank_that_fails_before_tells_those_that_compare() -> None:
    def work(ranks: Together) -> None:
        with ranks.telling():
            if ranks.rank == 2:
                raise OSError("no such file")
        ranks.agree("shard()", {})

    found, _ = on_ranks(3, work)
    assert [type(error) for error in found] == [RanksDifferError, RanksDifferError, OSError]
    assert "rank 2 failed: OSError: no such file" in str(found[0])
