"""A rank that holds the others up again and again lets its node leave the job, if that is asked for and can be."""

import os
import time

from dsx.elasticity.stragglers import StragglerJudge
from dsx_monitor.straggler import Straggler, StragglerReport
from dsx_testkit import run_ranks


def report(*ranks):
    return StragglerReport((), (), tuple(Straggler(rank, "forward", 9.0, 1.0) for rank in ranks))


class Reports:
    def __init__(self):
        self.latest = None


def judge(patience, rank=1, reason=""):
    reports, left = Reports(), []
    made = StragglerJudge(lambda: reports.latest, patience, rank, lambda: reason, lambda: left.append(rank))

    def see(*ranks):
        reports.latest = report(*ranks)
        made.after_update()
        made.after_update()  # the same comparison counts once
        return len(left)

    return see


def test_only_the_rank_that_is_named_so_often_in_a_row_leaves():
    see = judge(3)
    assert [see(1), see(1), see(), see(1), see(1), see(2), see(1), see(1), see(1, 2)] == [0] * 8 + [1]
    other = judge(3, rank=2)
    assert [other(1) for _ in range(6)] == [0] * 6


def test_it_stays_where_it_was_not_asked_for_or_cannot_leave(capfd):
    assert [judge(0)(1) for _ in range(3)] == [0] * 3
    see = judge(1, reason="there are 2 nodes, and the job needs at least 2")
    assert see(1) == 0


def slow_rank(rank, world, folder):
    import dsx
    import torch
    from dsx import elasticity
    from dsx.elasticity import stragglers

    asked = []
    stragglers._end_agent = lambda: asked.append(True)
    stragglers.StragglerJudge.__init__.__defaults__ = (stragglers._end_agent,)
    names = {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(names)
    model = torch.nn.Linear(4, 1)
    config = {
        "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2], "version": 0.1,
                       "replace_stragglers": 2},
        "straggler": {"enabled": True, "every": 3}, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }  # fmt: skip
    engine = dsx.initialize(model=model, config=config)[0]
    elasticity.resume(engine, folder, memory=False)

    def slow(*args):
        time.sleep(0.3 if rank == 1 else 0.0)

    model.register_forward_pre_hook(slow)
    for _ in range(7 * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    engine.destroy()
    return len(asked)


def test_an_engine_names_the_slow_rank_and_that_rank_ends_its_agent(tmp_path):
    assert run_ranks(slow_rank, 3, str(tmp_path)) == [0, 1, 0]
