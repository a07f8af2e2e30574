"""A failure behind the backward of a pipeline reaches every rank as one error, also where the program goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import dsx
import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

WIDTH = 8
TIMEOUT = 100  # seconds, also on a busy machine; far below the limit of a hang


class Fails(torch.optim.SGD):
    """Fails in the steps of `at` on the ranks of `ranks`, before or behind what the optimizer does."""

    at: tuple[int, ...] = ()
    how = "before"

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.done = 0

    def step(self, closure=None):
        self.done += 1
        failing = self.done in type(self).at
        if not failing or self.how == "behind":
            super().step(closure)
        if failing:
            raise ArithmeticError("planted")


def layers():
    torch.manual_seed(0)
    tied = [dsx_pipe.TiedLayerSpec("word", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    return [tied[0], nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), tied[1]]


def engine_of(stage=0, lr_scheduler=None, **more):
    module = dsx_pipe.PipelineModule(layers(), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
        **more,
    }
    return dsx.initialize(model=module, optimizer=Fails, lr_scheduler=lr_scheduler, config=config)[0]


def batch(engine, update):
    data = engine.module.grid.data
    generator = torch.Generator().manual_seed(100 * update + data.rank)
    rows = [torch.randn(2, WIDTH, generator=generator) for _ in range(2)]
    return iter([(row, row.flip(1)) for row in rows])


def outcome(call):
    """The class and the words of the error of a call."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "stage", None)
    return None


def weights(engine):
    return torch.cat([p.detach().reshape(-1) for p in engine.module.parameters()])


# - In the optimizer's step: some ranks have stepped, so that only a checkpoint helps


def _in_the_step(rank, world, bad, stage, how, folder):
    engine = engine_of(stage)
    engine.train_batch(batch(engine, 0))
    engine.save_checkpoint(folder, tag="one")
    Fails.at, Fails.how = ((2,) if rank == bad else ()), how
    first = outcome(lambda: engine.train_batch(batch(engine, 1)))
    Fails.at = ()
    again = outcome(lambda: engine.train_batch(batch(engine, 1)))
    saving = outcome(lambda: engine.save_checkpoint(folder, tag="two"))
    evaluating = outcome(lambda: engine.eval_batch(batch(engine, 1)))
    engine.load_checkpoint(folder)
    losses = [float(engine.train_batch(batch(engine, update))) for update in (1, 2)]
    return first, again, saving, evaluating, losses, engine.global_steps


def _undisturbed(rank, world, stage, updates=3):
    engine = engine_of(stage)
    return [float(engine.train_batch(batch(engine, update))) for update in range(updates)]


@pytest.mark.parametrize(
    ("world", "bad", "stage", "how"),
    [(2, 0, 0, "before"), (2, 1, 0, "behind"), (4, 0, 1, "before"), (4, 3, 2, "behind"), (4, 1, 3, "before")],
)
def test_a_failure_of_the_optimizer_on_one_rank(tmp_path, world, bad, stage, how):
    expected = run_ranks(_undisturbed, world, stage, timeout=TIMEOUT)[0]
    found = run_ranks(_in_the_step, world, bad, stage, how, str(tmp_path), timeout=TIMEOUT)
    for first, again, saving, evaluating, losses, steps in found:
        kind, text, at = first
        assert first == found[0][0] and kind == "StageError" and at == bad // (world // 2)
        assert "the update" in text and "failed: ArithmeticError: planted" in text, text
        assert f"stage {at} (rank {bad}): " in text, text
        assert again == found[0][1] == saving == evaluating and again[0] == "EngineError"
        assert "load a checkpoint" in again[1] and "planted" in again[1]
        assert losses == pytest.approx(expected[1:], rel=1e-5) and steps == 3


def _in_a_hook(rank, world, stage):
    engine = engine_of(stage)
    if rank == 1:
        engine.optimizer.register_step_pre_hook(_raise)
    return outcome(lambda: engine.train_batch(batch(engine, 0)))


def _raise(*_, **__):
    raise KeyError("planted in a hook")


@pytest.mark.parametrize("stage", (0, 1))
def test_a_failure_in_a_hook_of_the_step(stage):
    found = run_ranks(_in_a_hook, 2, stage, timeout=TIMEOUT)
    assert len(set(found)) == 1 and "stage 1" in found[0][1] and "planted in a hook" in found[0][1]


def _in_the_norm(rank, world, where):
    engine = engine_of(1)
    if rank == world - 1:
        if where == "squares":
            import dsx_zero.step.norm as at

            at.sum_of_squares = _raise
        else:
            import dsx_zero.update as at

            at.clip_factor = _raise
    return outcome(lambda: engine.train_batch(batch(engine, 0)))


@pytest.mark.parametrize(("world", "where"), [(2, "squares"), (4, "squares"), (4, "factor")])
def test_a_failure_while_gradients_are_clipped(world, where):
    found = run_ranks(_in_the_norm, world, where, timeout=TIMEOUT)
    assert len(set(found)) == 1 and found[0][0] == "StageError" and found[0][2] == 1


def _in_the_schedule(rank, world):
    def factor(step):
        return _raise() if step == 1 and rank == 0 else 1.0

    engine = engine_of(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    return outcome(lambda: engine.train_batch(batch(engine, 0)))


def test_a_failure_of_the_learning_rate_schedule():
    found = run_ranks(_in_the_schedule, 2, timeout=TIMEOUT)
    assert len(set(found)) == 1 and found[0][0] == "StageError" and found[0][2] == 0


# - Before anything has changed: training goes on


def _before_the_step(rank, world, bad, stage, where):
    engine = engine_of(stage)
    losses = [float(engine.train_batch(batch(engine, 0)))]
    before, mend = weights(engine), None
    shared = engine._pipeline.shared
    if rank == bad and where == "shared weights":
        mend, shared._write = shared._write, _raise
    elif rank == bad:
        engine.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    first = outcome(lambda: engine.train_batch(batch(engine, 1)))
    unchanged = torch.equal(before, weights(engine))
    if rank == bad and where == "shared weights":
        shared._write = mend
    elif rank == bad:
        engine.optimizer.param_groups[0]["params"].pop()
    losses += [float(engine.train_batch(batch(engine, update))) for update in (1, 2)]
    return first, unchanged, losses


@pytest.mark.parametrize("where", ("shared weights", "groups"))
@pytest.mark.parametrize(("world", "bad", "stage"), [(2, 0, 0), (2, 1, 1), (4, 2, 1), (4, 1, 2)])
def test_a_failure_before_the_step_changes_nothing(world, bad, stage, where):
    expected = run_ranks(_undisturbed, world, stage, timeout=TIMEOUT)[0]
    found = run_ranks(_before_the_step, world, bad, stage, where, timeout=TIMEOUT)
    for first, unchanged, losses in found:
        assert first == found[0][0] and first[0] == "StageError" and first[2] == bad // (world // 2)
        assert "preparing the update" in first[1] and unchanged
        assert losses == pytest.approx(expected, rel=1e-6)


# - The process ends


KILLED = """
import os, signal, sys
import torch
import dsx
import dsx_pipe
rank = int(os.environ["RANK"])
class Killed(torch.optim.SGD):
    needs_whole_tensors = False  # else `initialize` tries a step
    def step(self, closure=None):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(closure)
layers = [torch.nn.Linear(4, 4) for _ in range(2)]
module = dsx_pipe.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
engine = dsx.initialize(
    model=module, optimizer=lambda p: Killed(p, lr=0.1), config={"train_micro_batch_size_per_gpu": 2}
)[0]
x = torch.randn(2, 4)
try:
    engine.train_batch(iter([(x, x)]))
except Exception as error:
    print("caught", type(error).__name__, error, flush=True)
os._exit(3)
"""


def test_a_rank_that_is_killed_in_the_step_is_named(tmp_path):
    (tmp_path / "train.py").write_text(KILLED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    kept = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "train.py"],
            env={**kept, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -signal.SIGKILL and ranks[0].returncode == 3
    assert "caught PipelineError a rank of the pipeline is gone" in said[0], said[0]


def _no_failure(rank, world):
    """How many all-reduces of one number an update has."""
    engine = engine_of()
    calls = []
    real = dsx_comm.all_reduce
    engine.train_batch(batch(engine, 0))
    dsx_comm.all_reduce = lambda tensor, *a, **k: calls.append(tensor.numel()) or real(tensor, *a, **k)
    engine.train_batch(batch(engine, 1))
    return calls.count(1)


def test_the_ranks_agree_twice_in_an_update():
    assert run_ranks(_no_failure, 2, timeout=TIMEOUT) == [3, 3]  # two flags, and the norm's squares
