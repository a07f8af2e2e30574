"""Whatever ranks execute, all of them issue the same collectives in the same order, nobody waits for ever, and no
gradient is lost.

Ranks are threads, collectives are a fabric that checks what it is told: an operation ends only when every rank has
issued the same one at the same place of the one order of gathers and reduces.
"""

import logging
import random
import threading

import pytest
from dsx_zero.order.agreed import AgreedOrder, ScheduleDivergence
from dsx_zero.order.ahead import GatherLimits
from dsx_zero.order.protocol import NullOrder
from dsx_zero.order.schedule import Kind, Pass

PATIENCE = 4.0


class Fabric:
    """What all ranks share: the log of their collectives, words, and an accounting of gradients."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.changed = threading.Condition()
        self.logs = {kind: [[] for _ in range(ranks)] for kind in ("gather", "reduce")}
        self.all = [[] for _ in range(ranks)]
        self.rounds = [[] for _ in range(ranks)]
        self.reduced = 0
        self.broken = False

    def wait(self, ready, what):
        with self.changed:
            if not self.changed.wait_for(lambda: self.broken or ready(), PATIENCE) or (self.broken and not ready()):
                self.broken = True
                self.changed.notify_all()
                raise TimeoutError(what)

    def issue(self, kind, rank, unit):
        with self.changed:
            mine = self.all[rank]
            mine.append((kind, unit))
            for other in self.all:
                if len(other) >= len(mine) and other[len(mine) - 1] != mine[-1]:
                    self.broken = True
                    self.changed.notify_all()
                    raise AssertionError(f"{len(mine) - 1}: rank {rank} {mine[-1]}, another {other[len(mine) - 1]}")
            self.logs[kind][rank].append(unit)
            self.changed.notify_all()
            return len(self.logs[kind][rank])

    def everybody(self, kind, count):
        return lambda: all(len(log) >= count for log in self.logs[kind])


class Rank:
    """A rank's executor, channel and program."""

    def __init__(self, fabric, rank, **options):
        self.fabric, self.rank = fabric, rank
        self.order = AgreedOrder(self, self, **options)
        self.gathered, self.arrived, self.outstanding, self.gradients = {}, set(), [], {}
        self.slow = set()
        self.produced, self.unread = 0, False
        self.ahead = dict.fromkeys(Pass, 0)
        self.evaluation_rounds = []

    def exchange(self, words):
        return self.post(words)()

    def post(self, words):
        with self.fabric.changed:
            mine = self.fabric.rounds[self.rank]
            assert not self.unread, "words are sent before those of the round before are read"
            self.unread = True
            mine.append(words)
            turn = len(mine)
            self.fabric.changed.notify_all()

        def read():
            self.unread = False
            self.fabric.wait(
                lambda: all(len(r) >= turn for r in self.fabric.rounds), f"rank {self.rank} round {turn} {words}"
            )
            return [r[turn - 1] for r in self.fabric.rounds]

        return read

    def run_gather(self, unit):
        self.gathered[unit] = self.fabric.issue("gather", self.rank, unit)

    def holds(self, unit):
        return unit in self.gathered

    def held(self):
        return list(self.gathered)

    def waits_for(self, unit):
        return unit in self.slow

    def discard(self, unit):
        self.gathered.pop(unit, None)
        self.arrived.discard(unit)

    def run_reduce(self, unit):
        if len(self.outstanding) >= 2:
            self.fabric.wait(
                self.fabric.everybody("reduce", self.outstanding.pop(0)), f"rank {self.rank} reduce {unit}"
            )
        self.outstanding.append(self.fabric.issue("reduce", self.rank, unit))
        with self.fabric.changed:
            self.fabric.reduced += self.gradients.pop(unit, 0)

    def use(self, unit, during=Pass.TRAINING):
        if unit in self.arrived:
            self.order.use(unit)
        else:
            before = len(self.gathered) + (unit not in self.gathered)
            self.order.gather(unit, during=during)
            self.ahead[during] += len(self.gathered) - before
        assert unit in self.gathered
        self.arrived.add(unit)
        self.fabric.wait(self.fabric.everybody("gather", self.gathered[unit]), f"rank {self.rank} gather {unit}")
        if not self.order.keeps(unit):
            self.discard(unit)

    def step(self, program):
        """``program``: passes, each ('forward', units), ('backward', units) or ('evaluate', units); ('join', ()) after
        passes in different numbers.
        """
        for kind, units in program:
            if kind == "join":
                self.order.join()
                continue
            if kind == "evaluate":
                self.evaluate(units)
                continue
            for unit in units:
                self.use(unit)
                if kind == "backward":
                    self.gradients[unit] = self.gradients.get(unit, 0) + 1
                    self.produced += 1
                    self.order.reduce(unit)
            if kind == "forward":
                self.order.end_forward()
            else:
                for unit in sorted(self.gradients, reverse=True):
                    self.order.reduce(unit)
                self.order.end_backward()
                for count in self.outstanding:
                    self.fabric.wait(self.fabric.everybody("reduce", count), f"rank {self.rank} end of backward")
                self.outstanding.clear()
        self.order.boundary(lambda: list(self.gradients))
        assert not self.gradients

    def evaluate(self, units):
        before = len(self.fabric.rounds[self.rank])
        for unit in units:
            self.use(unit, Pass.EVALUATION)
        self.order.end_forward(during=Pass.EVALUATION)
        for unit in [*self.gathered]:
            self.discard(unit)
        self.evaluation_rounds.append(len(self.fabric.rounds[self.rank]) - before)


def run(programs, slow=(), **options):
    """``programs[rank][step]``; returns fabric and ranks. ``slow``: units whose shards a rank waits for."""
    fabric = Fabric(len(programs))
    ranks = [Rank(fabric, rank, **options) for rank in range(len(programs))]
    for rank, units in zip(ranks, slow):
        rank.slow = set(units)
    errors = []

    def work(rank, steps):
        try:
            for program in steps:
                rank.step(program)
        except BaseException as error:
            errors.append(error)
            with fabric.changed:
                fabric.broken = True
                fabric.changed.notify_all()

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in zip(ranks, programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    for logs in fabric.logs.values():
        assert all(log == logs[0] for log in logs)
    assert fabric.reduced == sum(rank.produced for rank in ranks)
    return fabric, ranks


FULL = [("forward", [0, 1, 2]), ("backward", [2, 1, 0])]


def test_uniform_steps_are_frozen_and_need_one_round_each():
    fabric, ranks = run([[FULL] * 5] * 3)
    assert str(ranks[0].order.schedule).splitlines() == [
        "gather(0) gather(1) gather(2) forward_end",
        "gather(2) reduce(2) gather(1) reduce(1) gather(0) reduce(0) backward_end",
    ]
    agreed = 2 * (3 + 1 + 6 + 1 + 1)  # two steps of agreement, then one round per boundary
    assert len(fabric.rounds[0]) == agreed + 3
    assert fabric.logs["gather"][0] == [0, 1, 2, 2, 1, 0] * 5


def test_a_rank_that_skips_units_joins_on_its_way():
    skips = [("forward", [0, 2]), ("backward", [2, 0])]
    fabric, _ = run([[FULL] * 6, [FULL] * 3 + [skips] * 3])
    assert len(fabric.logs["gather"][0]) == 36


def test_a_rank_that_skips_a_whole_backward_and_one_that_skips_a_micro_batch():
    two = FULL + FULL
    run([[two] * 5, [two] * 3 + [FULL, [FULL[0], *FULL]], [two] * 3 + [[], two]])


def test_needs_beyond_the_schedule_are_served_and_reported(caplog):
    caplog.set_level(logging.WARNING, logger="dsx_zero.order.agreed")
    other = [("forward", [0, 2, 1, 0]), ("backward", [0, 1, 2])]
    _, ranks = run([[FULL] * 4, [FULL] * 3 + [other]])
    assert "rank 1 needed" in caplog.text
    assert ranks[0].order.schedule is not None  # one such step does not unfreeze


def test_lasting_change_is_learnt_anew():
    other = [("forward", [0, 2, 1]), ("backward", [1, 2, 0])]
    _, ranks = run([[FULL] * 3 + [other] * 6] * 2)
    assert str(ranks[0].order.schedule).startswith("gather(0) gather(2) gather(1)")


@pytest.mark.parametrize(
    ("slow", "issued"),
    [
        (((), ()), "0 1 2 2 1 r2 0 r1 r0"),  # the next unit is gathered with the use of the one before
        (((1,), (1,)), "0 1 2 2 r2 1 0 r1 r0"),
        (((), (1,)), "0 1 2 2 r2 1 r1 0 r0"),  # one rank waits for its shard: no rank gathers early there
    ],
)
def test_gathers_run_ahead_on_all_ranks_or_on_none(slow, issued):
    limits = GatherLimits((1, 1, 1), max_live=2, prefetch=1)
    fabric, _ = run([[FULL] * 4] * 2, slow, limits=limits)
    names = [f"r{unit}" if kind == "reduce" else str(unit) for kind, unit in fabric.all[0]]
    assert " ".join(names[-9:]) == issued


def test_kept_units_are_gathered_once():
    reuse = [("forward", [0, 1, 0, 1]), ("backward", [1, 0])]
    limits = GatherLimits((1, 1), max_reuse_distance=10, max_live=10)
    fabric, _ = run([[reuse] * 4] * 2, limits=limits)
    assert fabric.logs["gather"][0][12:] == [0, 1, 1, 0] * 2


def test_ranks_that_executed_different_things_are_told():
    class Broken(AgreedOrder):
        def boundary(self, pending):
            self._sum += self._channel.rank  # as if this rank had executed something else
            super().boundary(pending)

    fabric = Fabric(2)
    ranks = [Rank(fabric, rank) for rank in range(2)]
    seen = []
    for rank in ranks:
        rank.order = Broken(rank, rank)

    def work(rank):
        try:
            rank.step(FULL)
        except ScheduleDivergence as error:
            seen.append(str(error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    [thread.start() for thread in threads]
    [thread.join(PATIENCE) for thread in threads]
    assert len(seen) == 2
    assert "rank 0" in seen[0] and "rank 1" in seen[0]


LOOK = ("evaluate", [0, 1, 2])


def test_forwards_without_gradients_freeze_and_prefetch():
    limits = GatherLimits((1, 1, 1), max_live=3, prefetch=1)
    fabric, ranks = run([[[LOOK, LOOK, LOOK, *FULL], [LOOK, *FULL], [LOOK, LOOK]]] * 3, limits=limits)
    for rank in ranks:
        # Two forwards agree on three gathers and their end; the others need a word where they begin and end.
        assert rank.evaluation_rounds == [4, 4, 2, 2, 2, 2]
        assert str(rank.order.evaluation_schedule) == "gather(0) gather(1) gather(2) forward_end"
        assert rank.ahead[Pass.EVALUATION] == 4 * 2  # of the three units of each, all but the first
    assert fabric.logs["gather"][0].count(0) == 6 + 3 * 2  # the last step executes its schedule too


def test_training_stays_frozen_beside_evaluation():
    fabric, ranks = run([[[LOOK, *FULL]] * 6] * 2)
    assert ranks[0].order.schedule is not None and ranks[0].order.evaluation_schedule is not None
    last = fabric.rounds[0][-4:]  # begin and end of the forward, training begins, boundary
    assert [Kind(words[0]) for words in last] == [
        Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.TRAINING_BEGIN, Kind.BOUNDARY,
    ]  # fmt: skip


def test_a_changed_evaluation_drops_its_own_order_only():
    other = ("evaluate", [2, 0, 1])
    _, ranks = run([[[LOOK, LOOK, *FULL]] * 3 + [[other, other, other, *FULL]]] * 2)
    training = [rank.order.schedule for rank in ranks]
    assert training[0] is not None and training[0] == training[1]
    assert {str(rank.order.evaluation_schedule) for rank in ranks} == {"gather(2) gather(0) gather(1) forward_end"}


def test_an_evaluation_that_needs_fewer_gathers_drops_its_order():
    short = ("evaluate", [0, 1])
    fabric, ranks = run([[[LOOK, LOOK, LOOK, short, short, short, short]]] * 2)
    assert str(ranks[0].order.evaluation_schedule) == "gather(0) gather(1) forward_end"
    assert fabric.logs["gather"][0] == [0, 1, 2] * 4 + [0, 1] * 3


def test_only_whole_forwards_become_an_order():
    """The fourth forward needs a unit beyond the order; what follows is the end of a forward, and no whole one."""
    changed = [LOOK, LOOK, LOOK, ("evaluate", [0, 2, 1])]
    for more, expected in ((1, "None"), (2, "gather(1) forward_end")):
        _, ranks = run([[[*changed, *[("evaluate", [1])] * more]]] * 2)
        assert [str(rank.order.evaluation_schedule) for rank in ranks] == [expected] * 2


FROZEN = [[LOOK, LOOK, *FULL]] * 3


@pytest.mark.parametrize(
    "paths",
    [
        ([LOOK, LOOK, *FULL], [LOOK, *FULL]),  # one rank evaluates less
        ([LOOK, LOOK, LOOK, *FULL], [LOOK, *FULL], [LOOK, LOOK, *FULL]),
        ([LOOK, *FULL], [("evaluate", [0]), *FULL]),  # it passes by
        ([LOOK, *FULL], [("evaluate", [0, 1, 2, 0, 1]), *FULL]),  # needs beyond the order
        ([LOOK, LOOK, *FULL], [("evaluate", [2, 1]), *FULL], [("evaluate", []), ("evaluate", [1]), *FULL]),
        ([LOOK, LOOK, LOOK, ("join", ()), *FULL], [("join", ()), *FULL]),  # different numbers, in their context
        ([LOOK, ("join", ()), *FULL], [("evaluate", [1, 0]), LOOK, LOOK, LOOK, ("join", ()), *FULL]),
        ([LOOK, *FULL], [LOOK, ("forward", [0])]),  # no backward on one rank
        ([FULL[0], LOOK, FULL[1]], [FULL[0], LOOK, LOOK, FULL[1]]),  # between forward and backward
    ],
)
def test_ranks_that_evaluate_differently_never_hang(paths):
    _, ranks = run([[*FROZEN, path, [LOOK, LOOK, *FULL], [LOOK, LOOK, *FULL]] for path in paths])
    assert len({str(rank.order.evaluation_schedule) for rank in ranks}) == 1
    assert ranks[0].order.evaluation_schedule is not None


def test_a_rank_that_has_joined_is_named_to_one_that_trains():
    with pytest.raises(ScheduleDivergence, match="rank 0 at join, rank 1 at training_begin"):
        run([[*FROZEN, [LOOK, ("join", ())]], [*FROZEN, [LOOK, *FULL]]])


def _random_pass(rng, units):
    chosen = [u for u in range(units) if rng.random() < 0.7]
    if rng.random() < 0.3:
        rng.shuffle(chosen)
    return chosen + [rng.randrange(units) for _ in range(rng.random() < 0.3)]


def _random_step(rng, units, evaluates):
    program = []
    for _ in range(rng.choice([1, 1, 3]) if evaluates else 0):
        program.append(("evaluate", _random_pass(rng, units)))
    for _ in range(rng.choice([1, 1, 2, 3])):
        program.append(("forward", _random_pass(rng, units)))
        if rng.random() < 0.85:
            program.append(("backward", _random_pass(rng, units)[::-1]))
    return program


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_never_hang_and_lose_nothing(seed):
    rng = random.Random(seed)
    ranks, units = rng.randint(2, 6), rng.randint(1, 5)
    evaluates = rng.random() < 0.5
    common = _random_step(rng, units, evaluates)
    frozen = [common] * rng.choice([0, 2, 3])
    limits = GatherLimits(
        (1,) * units,
        max_reuse_distance=rng.choice([0, 3]),
        max_live=rng.choice([2, 100]),
        prefetch=rng.choice([0, 1, 3]),
    )
    programs = [
        frozen
        + [common if rng.random() < 0.4 else _random_step(rng, units, evaluates) for _ in range(4)]
        + [common] * 2
        for _ in range(ranks)
    ]
    run(programs, limits=limits)


def test_one_rank_needs_no_agreement():
    done = []

    class Executor:
        def run_gather(self, unit):
            done.append((Kind.GATHER, unit))

        def run_reduce(self, unit):
            done.append((Kind.REDUCE, unit))

    order = NullOrder(Executor())
    order.gather(1)
    order.end_forward()
    order.reduce(1)
    order.end_backward()
    order.boundary(lambda: [4])
    assert done == [(Kind.GATHER, 1), (Kind.REDUCE, 1), (Kind.REDUCE, 4)]
