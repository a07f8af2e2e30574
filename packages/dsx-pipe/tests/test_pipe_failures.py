"""A stage that fails ends the step on every rank. The error names stage, layer and micro-batch, and nothing hangs."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import dsx_comm
import pytest
import torch
from dsx_pipe import Pipeline, PipelineError, PipelineModule, StageError, build
from dsx_pipe.errors import ScheduleError
from dsx_testkit import RankError, run_ranks
from torch import nn

WIDTH = 4


class Layer(nn.Module):
    """A linear layer that can fail, in the way `how`, at the micro-batch `at`."""

    def __init__(self, how=None, at=2):
        super().__init__()
        self.linear, self.how, self.at, self.seen = nn.Linear(WIDTH, WIDTH), how, at, 0

    def forward(self, x):
        self.seen += 1
        now = self.seen == self.at + 1
        if now and self.how == "raise":
            raise KeyError("planted")
        if now and self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if now and self.how == "shape":
            x = x[:, :3]
        x = self.linear(x)
        if self.seen > self.at and self.how == "nan":
            x = x / 0 * 0
        if now and self.how == "backward":
            x.register_hook(_fail)
        return x


def _fail(_gradient):
    raise ArithmeticError("planted in backward")


class NotFinite(torch.autograd.Function):
    """The identity, whose backward divides by zero."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


class Spoils(nn.Module):
    """A layer whose backward gives values that are not finite, for the micro-batch whose data say `bad`."""

    def __init__(self, of_weight):
        super().__init__()
        self.scale, self.of_weight = nn.Parameter(torch.ones(WIDTH)), of_weight

    def forward(self, x, bad):
        if not bad:
            return x * self.scale
        return x * NotFinite.apply(self.scale) if self.of_weight else NotFinite.apply(x) * self.scale


class Marked(nn.Module):
    """Passes (values, mark) on; the mark says which micro-batch is spoiled."""

    def __init__(self, spoils=None):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = Spoils(spoils == "weight") if spoils else None

    def forward(self, value):
        x, mark = value
        y = self.first(x)
        if self.between is not None:
            y = self.between(y, bool(mark.eq(1).all()))
        return x + self.second(torch.tanh(y)), mark


def marked_loss(output, labels):
    return nn.functional.mse_loss(output[0], labels)


def spoiled(rank, world, name, bad_stage, spoils):
    torch.manual_seed(0)
    plan = build(name, world, 4)
    mods = [nn.Sequential(Marked(), Marked(spoils if s == bad_stage else None)) for s in plan.stages_of(rank)]
    pipe = Pipeline(mods, plan, loss_fn=marked_loss)
    batches = [((torch.randn(2, WIDTH), torch.full((2,), int(m == 2))), torch.randn(2, WIDTH)) for m in range(4)]
    try:
        pipe.train_batch(iter(batches))
    except StageError as error:
        found = str(error), error.stage, error.micro_batch, error.layer
    else:
        found = None
    for m in mods:
        m.zero_grad()
        m[1].between = None
    assert torch.isfinite(pipe.train_batch(iter(batches)))  # training goes on
    return found


@pytest.mark.parametrize(
    "name, stage", [("1f1b", 0), ("1f1b", 1), ("gpipe", 2), ("zb-h1", 0), ("zb-h1", 1), ("zbv", 3), ("zbv", 0)]
)
def test_a_gradient_that_is_not_finite_is_named_with_its_layer(name, stage):
    results = run_ranks(spoiled, 3, name, stage, "input", backend="dsx")
    assert len(set(results)) == 1, results
    text, *where = results[0]
    assert where == [stage, 2, "1.between (Spoils)"]
    assert "backward failed: gradients stop being finite here" in text


@pytest.mark.parametrize("name, stage", [("1f1b", 1), ("zb-h1", 2)])
def test_a_gradient_of_a_weight_alone_that_is_not_finite(name, stage):
    results = run_ranks(spoiled, 3, name, stage, "weight", backend="dsx")
    assert len(set(results)) == 1, results
    text, *where = results[0]
    assert where == [stage, None, "1.between (Spoils)"] and "the gradient of 1.between.scale is not finite" in text


def stage_with(how):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(how))


def step_with_failure(rank, world, name, how, bad_stage, step_again=True):
    torch.manual_seed(0)
    plan = build(name, world, 4)
    mods = [stage_with(how if s == bad_stage else None) for s in plan.stages_of(rank)]
    pipe = Pipeline(mods, plan, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, WIDTH)
    try:
        pipe.step(x, x)
    except StageError as error:
        found = (str(error), error.stage, error.rank, error.micro_batch, error.layer)
    else:
        found = None
    if step_again:
        for m in mods:
            m[1].how = None
        pipe.step(x, x)
    return found


CASES = [
    ("1f1b", "raise", 1, "1 (Layer)", "forward failed: KeyError: 'planted' (the stage's input is float32[2, 4])"),
    ("gpipe", "raise", 0, "1 (Layer)", "forward failed: KeyError"),
    ("zb-h1", "raise", 2, "1 (Layer)", "forward failed: KeyError"),
    ("zbv", "raise", 4, "1 (Layer)", "forward failed: KeyError"),
    ("1f1b", "shape", 1, "1.linear (Linear)", "forward failed: RuntimeError: mat1 and mat2"),
    ("1f1b", "nan", 1, "1 (Layer)", "forward failed: the loss is nan"),
    ("gpipe", "nan", 0, "1 (Layer)", "forward failed: the loss is nan"),
    ("1f1b", "backward", 1, None, "backward failed: ArithmeticError: planted in backward"),
    ("zb-h1", "backward", 1, None, "backward failed: ArithmeticError"),
]


@pytest.mark.parametrize("name, how, stage, layer, says", CASES)
def test_every_rank_raises_the_same_error(name, how, stage, layer, says):
    results = run_ranks(step_with_failure, 3, name, how, stage, backend="dsx")
    assert len(set(results)) == 1, results
    text, at, _, micro_batch, found = results[0]
    assert (at, micro_batch) == (stage, 2) and says in text
    assert f"stage {stage} (rank" in text and "micro-batch 2" in text
    if layer is not None and how != "nan":
        assert found == layer
    if how == "nan":
        assert "first stage where its values are not finite" in text


def test_every_rank_raises_the_same_error_on_gloo_too():
    results = run_ranks(step_with_failure, 3, "1f1b", "raise", 1)
    assert len(set(results)) == 1 and results[0][1] == 1


@pytest.mark.parametrize("backend", ("gloo", "dsx"))
def test_a_killed_stage_ends_the_others(backend):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(killed, 3, backend=backend)
    assert time.monotonic() - start < 45
    assert caught.value.failures[0].rank == 1 and "SIGKILL" in str(caught.value)


def killed(rank, world):
    step_with_failure(rank, world, "1f1b", "die", 1, step_again=False)


KILLED = """
import os, signal, sys
import torch
import dsx_comm
import dsx_pipe
dsx_comm.init_distributed(sys.argv[1])
rank = dsx_comm.get_rank()
class Stage(torch.nn.Linear):
    seen = 0
    def forward(self, x):
        Stage.seen += 1
        if rank == 1 and Stage.seen == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
pipe = dsx_pipe.Pipeline(Stage(4, 4), "1f1b", micro_batches=8, loss_fn=torch.nn.functional.mse_loss)
x = torch.randn(16, 4)
pipe.step(x, x)
"""


@pytest.mark.parametrize("backend", ("gloo", "dsx"))
def test_the_others_name_the_stage_that_was_killed(tmp_path, backend):
    (tmp_path / "train.py").write_text(KILLED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environments = [
        {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for r in range(3)
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "train.py", backend],
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    for r in (0, 2):
        assert ranks[r].returncode == 1 and re.search(r"Error: (stage 1 \(rank 1\)|.*rank 1)", errors[r]), errors[r]


class Late(nn.Module):
    """A layer that fails in the second backward, which is the last one of a step."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.fails = nn.Linear(WIDTH, WIDTH), 0, True

    def forward(self, x):
        out = self.linear(x)
        out.register_hook(self._hook)
        return out

    def _hook(self, gradient):
        self.seen += 1
        if self.fails and self.seen == 2:
            raise ArithmeticError("planted late")


def fail_in_last_backward(rank, world):
    shared, bad = nn.Linear(WIDTH, WIDTH), Late()
    layers = [bad, shared, nn.Tanh(), shared]
    pm = PipelineModule(layers, num_stages=world, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    assert pm.ties
    pipe, x = Pipeline(pm, "1f1b", micro_batches=2), torch.randn(4, WIDTH)
    with pytest.raises(StageError, match=r"stage 0 \(rank 0\), micro-batch 1: backward failed: .*planted late"):
        pipe.step(x, x)  # the other stage has finished all of its work when this happens
    bad.fails = False
    pipe.step(x, x)


def test_the_last_backward_of_a_step_fails_in_a_model_with_tied_weights():
    run_ranks(fail_in_last_backward, 2, backend="dsx", timeout=40)


def slow_stage(rank, world, slow):
    module, x = stage_with(None), torch.randn(8, WIDTH)
    pipe = Pipeline(module, "1f1b", micro_batches=4, loss_fn=nn.functional.mse_loss)
    dsx_comm.explain_hangs(limit=60.0)
    pipe.step(x, x)  # what is slow only in the first step
    dsx_comm.explain_hangs(limit=1.5)
    dsx_comm.barrier()
    if rank == slow:
        module.register_forward_hook(lambda *_: time.sleep(5.0))
    try:
        pipe.step(x, x)
    except StageError as error:
        return error.stage, error.rank, str(error)
    finally:
        time.sleep(0 if rank == slow else 6.0)  # the ranks that were right to give up are still there
    return None


@pytest.mark.parametrize("backend, slow", [("gloo", 0), ("dsx", 1)])
def test_a_stage_that_is_too_slow_is_named_on_every_rank(backend, slow):
    results = run_ranks(slow_stage, 2, slow, backend=backend)
    for stage, rank, text in results:
        assert (stage, rank) == (slow, slow), text
        assert f"communication with stage {slow} (rank {slow}) failed" in text and "HangError" in text
        assert f"Rank(s) {slow} neither sent nor received meanwhile" in text


def wrong_data(rank, world, items):
    pipe = Pipeline(stage_with(None), "1f1b", micro_batches=4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(2, WIDTH)
    with pytest.raises(
        StageError, match=r"stage 0 .*micro-batch 2: loading data failed: the data iterator ended: got 2"
    ):
        pipe.train_batch(iter([(x, x)] * items))
    with pytest.raises(StageError, match="no data iterator"):
        pipe.train_batch()
    with pytest.raises(StageError, match=r"expected \(inputs, labels\)"):
        pipe.train_batch(iter([x] * 4))
    with pytest.raises(StageError, match="cannot be split into 4"):
        pipe.step(x, x)
    with pytest.raises(StageError, match=r"the data iterator is a list, expected .*iter\(...\)"):
        pipe.train_batch([(x, x)] * 4)
    with pytest.raises(StageError, match="its labels are None"):
        pipe.train_batch(iter([(x, None)] * 4))
    with torch.no_grad(), pytest.raises(StageError, match=r"under torch.no_grad\(\)"):
        pipe.train_batch(iter([(x, x)] * 4))
    return float(pipe.train_batch(iter([(x, x)] * 4)))


def test_data_that_ends_in_the_middle_or_has_another_form():
    assert len(run_ranks(wrong_data, 2, 2, backend="dsx")) == 2


def loss_with_many_elements(rank, world):
    pipe = Pipeline(stage_with(None), "1f1b", micro_batches=2)
    with pytest.raises(
        StageError, match=r"the loss is float32\[2, 4\], expected a tensor with one element; pass loss_fn"
    ):
        pipe.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))


def test_a_loss_that_is_not_a_scalar():
    run_ranks(loss_with_many_elements, 2, backend="dsx")


def input_with_infinity(rank, world):
    pipe = Pipeline(stage_with(None), "1f1b", micro_batches=2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, WIDTH)
    x[3] = float("inf")
    with pytest.raises(
        StageError, match=r"stage 0 \(rank 0\), micro-batch 1: .*its input, from the data, are not finite"
    ):
        pipe.step(x, torch.zeros(4, WIDTH))
    ignoring = Pipeline(stage_with(None), "1f1b", micro_batches=2, loss_fn=nn.functional.mse_loss, nonfinite="ignore")
    assert not torch.isfinite(ignoring.step(x, x))


def test_data_that_is_not_finite():
    run_ranks(input_with_infinity, 2, backend="dsx")


def different_code(rank, world, how):
    loss = nn.functional.mse_loss
    x = torch.randn(8, WIDTH)
    if how == "schedule":
        pipe = Pipeline(stage_with(None), ("1f1b", "gpipe")[rank], micro_batches=4, loss_fn=loss)
        with pytest.raises(
            PipelineError,
            match=r"stage 0 \(rank 0\): train_batch, 1f1b with 4[^\n]*\n  stage 1 \(rank 1\): train_batch, gpipe",
        ):
            pipe.step(x, x)
    if how == "call":
        pipe = Pipeline(stage_with(None), "1f1b", micro_batches=4, loss_fn=loss)
        with pytest.raises(PipelineError, match=r"not about to do the same"):
            pipe.step(x, x) if rank else pipe.eval_batch(iter([(x, x)] * 4))
    if how == "arguments":
        with pytest.raises(ScheduleError, match="has 4 ranks, the group has 2"):
            Pipeline(stage_with(None), build("1f1b", 4, 4))
        with pytest.raises(PipelineError, match=r"got 1 modules, expected 2: schedule 'zbv'"):
            Pipeline(stage_with(None), build("zbv", 2, 4))
        with pytest.raises(ScheduleError, match="pass micro_batches"):
            Pipeline(stage_with(None), "1f1b")


@pytest.mark.parametrize("how", ("schedule", "call", "arguments"))
def test_different_code_on_different_stages(how):
    run_ranks(different_code, 2, how, backend="dsx")
