"""The agreement as a pure function, and schedules as data."""

import itertools

import pytest
from dsx_zero.order.ahead import GatherLimits, Need
from dsx_zero.order.schedule import (
    Decision,
    Kind,
    Operation,
    Pass,
    Post,
    Schedule,
    checksum,
    decide,
    elide_gathers,
    posts_of,
)

G, R = (lambda u: Operation(Kind.GATHER, u)), (lambda u: Operation(Kind.REDUCE, u))
U = lambda u: Operation(Kind.USE, u)  # noqa: E731
LOOK, TRAIN, JOIN = Operation(Kind.FORWARD_BEGIN), Operation(Kind.TRAINING_BEGIN), Operation(Kind.JOIN)
FWD, BWD, END = Operation(Kind.FORWARD_END), Operation(Kind.BACKWARD_END), Operation(Kind.BOUNDARY)


def posts(*operations):
    return [Post(operation) for operation in operations]


@pytest.mark.parametrize(
    ("asked", "operations", "resume"),
    [
        ([G(3), G(3)], [G(3)], {0, 1}),
        ([G(3), G(1)], [G(3), G(1)], {0, 1}),
        ([G(3), R(5)], [G(3)], {0}),
        ([G(3), END, FWD], [G(3)], {0}),
        ([R(4), R(4)], [R(4)], {0, 1}),
        ([R(4), END], [R(4)], {0}),
        ([R(2), R(4), BWD], [R(4)], {1}),
        ([FWD, FWD], [], {0, 1}),
        ([FWD, BWD, END], [], {0, 1}),
        ([END, END, END], [], {0, 1, 2}),
        ([END], [], {0}),
        ([LOOK, END, JOIN], [LOOK], {0}),
        ([LOOK, LOOK, FWD], [LOOK], {0, 1}),
        ([G(1), LOOK], [LOOK], {1}),
        ([R(1), LOOK, END, LOOK], [LOOK], {1, 3}),
        ([FWD, TRAIN], [], {0}),
        ([TRAIN, TRAIN, END], [], {0, 1}),
    ],
)
def test_who_executes_what_and_who_goes_on(asked, operations, resume):
    assert decide(posts(*asked)) == Decision(0, tuple(operations), frozenset(resume))


def test_every_combination_lets_somebody_go_on_and_executes_only_what_was_asked():
    kinds = [G(0), G(1), R(0), R(1), FWD, BWD, END]
    for asked in itertools.product(kinds, repeat=4):
        decision = decide(posts(*asked))
        assert decision.resume
        assert set(decision.operations) <= set(asked)
        for rank, operation in enumerate(asked):
            if operation.kind in (Kind.GATHER, Kind.REDUCE):
                assert (rank in decision.resume) == (operation in decision.operations)
            elif operation == END:
                assert (rank in decision.resume) == (set(asked) == {END})
        assert sum(op.kind is Kind.REDUCE for op in decision.operations) <= 1


@pytest.mark.parametrize("asked", [(JOIN, END), (JOIN, TRAIN), (JOIN, TRAIN, END)])
def test_ranks_that_can_never_go_on_are_named(asked):
    with pytest.raises(ValueError, match="rank 0 at join, rank 1 at"):
        decide(posts(*asked))


def test_all_align_to_the_one_who_is_farthest():
    assert decide([Post(G(0), position=3), Post(END, position=7)]).align == 7
    # The ranks that begin a forward without gradients have gone on already.
    assert decide([Post(LOOK, position=3), Post(END, position=7)]).align == 0


def test_words_survive_the_wire():
    for post in (
        Post(G(7)),
        Post(END, Pass.OUTSIDE, 12, 0xFFFFFFFF, R(3)),
        Post(FWD, Pass.EVALUATION, 1, 2, skipped=True, squares=float("inf")),
    ):
        words = post.to_words()
        assert len(words) == Post.WORDS
        assert Post.from_words(words) == post


def test_the_checksum_tells_orders_apart():
    one = checksum([G(1)], checksum([G(0)]))
    other = checksum([G(0)], checksum([G(1)]))
    assert one != other
    assert one == checksum([G(0), G(1)])
    assert checksum([G(1)]) != checksum([R(1)])


STEP = Schedule((G(0), G(1), G(0), FWD, G(1), R(1), G(0), R(0), BWD))


def test_find_stays_in_the_pass_where_it_should():
    assert STEP.find(G(1), 0) == 1
    assert STEP.find(G(1), 2) == 4
    assert STEP.find(R(9), 0) is None
    assert STEP.find_in_pass(G(1), 2) is None
    assert STEP.find_in_pass(R(0), 4) == 7


def test_a_schedule_prints_one_pass_per_line():
    assert str(STEP).splitlines() == [
        "gather(0) gather(1) gather(0) forward_end",
        "gather(1) reduce(1) gather(0) reduce(0) backward_end",
    ]


def test_reuse_within_the_distance_needs_no_second_gather():
    kept = elide_gathers(STEP, [10, 5], max_reuse_distance=15, max_live=100)
    assert kept.entries == (G(0), G(1), U(0), FWD, G(1), R(1), G(0), R(0), BWD)
    kept.validate(2)


@pytest.mark.parametrize(("distance", "live"), [(14, 100), (15, 14), (0, 100)])
def test_reuse_beyond_the_limits_gathers_again(distance, live):
    assert elide_gathers(STEP, [10, 5], max_reuse_distance=distance, max_live=live) == STEP


def test_units_kept_at_the_same_time_share_the_live_limit():
    step = Schedule((G(0), G(1), G(2), G(0), G(1), FWD))
    both = elide_gathers(step, [10, 10, 10], max_reuse_distance=100, max_live=30)
    assert both.entries.count(U(0)) == both.entries.count(U(1)) == 1
    one = elide_gathers(step, [10, 10, 10], max_reuse_distance=100, max_live=29)
    assert one.entries == (G(0), G(1), G(2), U(0), G(1), FWD)
    assert elide_gathers(step, [10, 10, 10], max_reuse_distance=100, max_live=19) == step


@pytest.mark.parametrize("entries", [(G(2),), (U(0),), (G(0), FWD, U(0)), (END,), (G(-1),)])
def test_an_impossible_schedule_is_refused(entries):
    with pytest.raises(ValueError, match="schedule entry"):
        Schedule(entries).validate(2)


HELD_ALIKE = Need(frozenset())
NOTHING = {"max_live": 100, "prefetch": 100}


@pytest.mark.parametrize(
    ("limits", "needs", "ahead"),
    [
        ({"max_live": 100, "prefetch": 10}, {}, {0: (1,), 1: (2,)}),  # units 0, 1 and 2 have 10, 10 and 5 elements
        ({"max_live": 100, "prefetch": 15}, {}, {0: (1, 2)}),
        ({"max_live": 100, "prefetch": 1}, {}, {0: (1,), 1: (2,)}),  # one unit is always allowed
        ({"max_live": 100, "prefetch": 0}, {}, {}),
        ({"max_live": 19, "prefetch": 100}, {}, {1: (2,)}),
        ({"max_live": 14, "prefetch": 100}, {}, {}),
        (NOTHING, {1: Need(frozenset(), waits=True)}, {1: (2,)}),  # a shard on a disk
        (NOTHING, {1: None}, {}),  # the ranks said different things at place 1, so that nothing is known there
        (NOTHING, {0: Need(frozenset({1}))}, {1: (2,)}),  # unit 1 is not free yet
    ],
)
def test_what_runs_ahead_follows_from_what_all_ranks_said(limits, needs, ahead):
    step = [G(0), G(1), G(2), FWD, G(2), R(2), BWD, G(0)]
    said = [needs.get(place, HELD_ALIKE) if entry.kind is Kind.GATHER else None for place, entry in enumerate(step)]
    said[4] = None  # only the forward is looked at
    schedule = GatherLimits((10, 10, 5), **limits).apply(step, said)
    assert {place: found for place, found in enumerate(schedule.ahead) if found} == ahead
    order, due = schedule.issued
    assert sorted(order) == [place for place, entry in enumerate(step) if entry.unit >= 0]
    assert all(order.index(place) < due[place] for place in order)


def test_no_gather_runs_ahead_over_the_end_of_a_backward():
    step = [G(0), FWD, G(1), R(1), BWD, G(0), FWD]
    schedule = GatherLimits((1, 1), max_live=9, prefetch=9).apply(step, [HELD_ALIKE] * len(step))
    assert schedule.ahead == ((2,), (), (), (), (), (), ())


def test_a_unit_that_is_kept_is_not_gathered_ahead_meanwhile():
    step = [G(0), G(1), G(0), FWD, G(0)]
    limits = GatherLimits((1, 1), max_live=9, prefetch=9, max_reuse_distance=9)
    schedule = limits.apply(step, [HELD_ALIKE] * len(step))
    assert schedule.entries[2] == U(0)
    assert schedule.ahead == ((1,), (), (), (), ())


@pytest.mark.parametrize("kind", list(Kind))
def test_many_ranks_that_say_the_same_are_decided_like_each_alone(kind):
    post = Post(Operation(kind, 3 if kind in (Kind.GATHER, Kind.REDUCE, Kind.USE) else -1), position=5)
    shared, each = posts_of([post.to_words()] * 5), [Post.from_words(post.to_words()) for _ in range(5)]
    assert shared == each and all(found is shared[0] for found in shared)
    assert decide(shared) == decide(each)


def test_posts_of_ranks_that_differ():
    posts = [Post(Operation(Kind.BOUNDARY), squares=float(rank)) for rank in (1, 2, 1)]
    assert posts_of([post.to_words() for post in posts]) == posts
