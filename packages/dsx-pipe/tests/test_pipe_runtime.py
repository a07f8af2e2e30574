"""`Pipeline` without an engine: losses and gradients equal one process under every schedule, for values of any
structure.
"""

import dsx_comm
import dsx_pipe
import pytest
import torch
from dsx_pipe import Pipeline, Schedule, build, live_activations, with_communication
from dsx_pipe.schedule import Span, TrainSchedule, schedule_of
from dsx_testkit import run_ranks
from torch import nn

WIDTH, ROWS = 6, 24


def layers_of(count, dtype=torch.float64):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).to(dtype) for _ in range(count)]


def data(dtype=torch.float64, rows=ROWS):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, WIDTH, generator=generator).to(dtype), torch.randn(rows, WIDTH, generator=generator).to(
        dtype
    )


def oracle(count, micro_batches, dtype=torch.float64):
    """Loss and gradients of plain accumulation over the same micro-batches in one process."""
    model, (x, y) = nn.Sequential(*layers_of(count, dtype)), data(dtype)
    total = 0.0
    for a, b in zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches)):
        loss = nn.functional.mse_loss(model(a), b) / micro_batches
        loss.backward()
        total += float(loss)
    return total, [[p.grad for p in layer.parameters()] for layer in model]


def plan_of(name, ranks, micro_batches):
    if name == "documented stream":
        return schedule_of(TrainSchedule, micro_batches, ranks)
    if name.startswith("written "):
        return with_communication(build(name.removeprefix("written "), ranks, micro_batches))
    if name == "own":  # forwards in another order than backwards
        rows = [
            [f"{r}F{m}" for m in range(micro_batches)] + [f"{r}B{m}" for m in reversed(range(micro_batches))]
            for r in range(ranks)
        ]
        return Schedule.of("own", micro_batches, range(ranks), rows)
    return build(name, ranks, micro_batches)


def train(rank, world, name, micro_batches, dtype):
    plan = plan_of(name, world, micro_batches)
    layers = layers_of(2 * plan.stages, dtype)
    mine = [nn.Sequential(*layers[2 * s : 2 * s + 2]) for s in plan.stages_of(rank)]
    pipe = Pipeline(mine, plan, loss_fn=nn.functional.mse_loss)
    x, y = data(dtype)
    for _ in range(2):  # in the second step the shapes of messages are known
        for stage in mine:
            stage.zero_grad()
        loss = pipe.step(x if pipe.is_first_stage else None, y if pipe.is_last_stage else None)
    expected, gradients = oracle(2 * plan.stages, micro_batches, dtype)
    tolerances = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 1e-3}
    assert float(loss) == pytest.approx(expected, rel=1e-6 if dtype is torch.float64 else 1e-2)
    for stage, module in zip(plan.stages_of(rank), mine):
        flat = [g for layer in gradients[2 * stage : 2 * stage + 2] for g in layer]
        for p, g in zip(module.parameters(), flat, strict=True):
            torch.testing.assert_close(p.grad, g, **tolerances)
    kept = pipe.most_kept()
    assert sum(kept.values()) >= live_activations(plan)[rank] and max(kept.values()) <= live_activations(plan)[rank]
    report = pipe.report()
    assert len(report.measured.spans) == sum(a.kind.computes for row in plan.actions for a in row)
    assert report.ideal.length <= report.measured.length * 1.001
    return kept, float(loss)


NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "own", "documented stream", "written zbv")


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_one_process(name):
    results = run_ranks(train, 2, name, 4, torch.float64, backend="dsx")
    assert len({loss for _, loss in results}) == 1


@pytest.mark.parametrize("name", ("1f1b", "zb-h1"))
def test_on_gloo_with_three_ranks(name):
    run_ranks(train, 3, name, 6, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("gloo", "dsx"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_losses_and_gradients_matrix(ranks, name, dtype, backend):
    run_ranks(train, ranks, name, 12, dtype, backend=backend)


def most_kept(rank, world, micro_batches):
    plan = build("1f1b", world, micro_batches)
    pipe = Pipeline(layers_of(world)[rank], plan, loss_fn=nn.functional.mse_loss)
    pipe.step(*data())
    return pipe.most_kept()[rank]


@pytest.mark.parametrize("micro_batches", (2, 8))
def test_1f1b_keeps_exactly_min_p_minus_s_m_activations(micro_batches):
    assert run_ranks(most_kept, 4, micro_batches, backend="dsx") == [min(4 - s, micro_batches) for s in range(4)]


# - values of any structure


# Every rank must be able to import these classes, as it can import those of a user's script.
Batch = Span  # a frozen dataclass; its fields are called rank, action, start, end
Pair = torch.nn.modules.module._IncompatibleKeys  # a named tuple


class Structured(nn.Module):
    """Takes and returns nested containers; integers, masks, None and text are passed on without gradients."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH).double()

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            hidden, mask, count = value, value > 0, 0
        elif self.kind == "dataclass":
            hidden, mask, count = value.rank, value.action, int(value.start)
        elif self.kind == "namedtuple":
            hidden, mask, count = value.missing_keys, value.unexpected_keys, 0
        elif self.kind == "tuple":
            hidden, (mask, count, nothing) = value
            assert nothing is None
        else:
            hidden, (mask, count) = value["hidden"], value["rest"]
        assert mask.dtype is torch.bool and not mask.requires_grad
        out = torch.tanh(self.linear(hidden)) * mask
        return {
            "dataclass": lambda: Batch(out, mask, str(count + 1), None),
            "namedtuple": lambda: Pair(out, mask),
            "tuple": lambda: (out, (mask, count + 1, None)),
            "dict": lambda: {"hidden": out, "rest": [mask, count + 1], "empty": torch.empty(0)},
        }[self.kind]()


def squared_error(value, labels):
    hidden = value if isinstance(value, torch.Tensor) else (value.get("hidden") if isinstance(value, dict) else None)
    if hidden is None:
        hidden = value.rank if isinstance(value, Batch) else value[0]
    return (hidden - labels).square().mean()


def structured(rank, world, kind, schedule):
    torch.manual_seed(0)
    stages = [Structured(kind) for _ in range(world)]
    pipe = Pipeline(stages[rank], schedule, micro_batches=4, loss_fn=squared_error)
    x, y = data()
    loss = pipe.step(x, y)
    mine = [p.grad.clone() for p in stages[rank].parameters()]
    for stage in stages:
        stage.zero_grad()
    total = 0.0
    for a, b in zip(x.tensor_split(4), y.tensor_split(4)):
        value = a
        for stage in stages:
            value = stage(value)
        one = squared_error(value, b) / 4
        one.backward()
        total += float(one)
    assert float(loss) == pytest.approx(total, rel=1e-6)
    for got, p in zip(mine, stages[rank].parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "kind, schedule", [("tuple", "1f1b"), ("dict", "zb-h1"), ("dataclass", "1f1b"), ("namedtuple", "gpipe")]
)
def test_containers_pass_between_stages(kind, schedule):
    run_ranks(structured, 3, kind, schedule, backend="dsx")


class Skipping(nn.Module):
    """Returns a used output, an unused one and its input; the next stage takes the first."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, value):
        x = value if isinstance(value, torch.Tensor) else value[0]
        return self.used(x), self.unused(x), x


def unused(rank, world, schedule):
    torch.manual_seed(0)
    stage = Skipping()
    pipe = Pipeline(stage, schedule, micro_batches=3, loss_fn=lambda out, labels: (out[0] - labels).square().mean())
    pipe.step(*data())
    assert stage.unused.weight.grad is None and stage.used.weight.grad is not None


@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1"))
def test_outputs_that_no_stage_uses_have_no_gradient(schedule):
    run_ranks(unused, 2, schedule, backend="dsx")


# - evaluation, shapes


def evaluate(rank, world):
    layers = layers_of(world)
    pipe = Pipeline(layers[rank], "1f1b", micro_batches=4, loss_fn=nn.functional.mse_loss)
    model, (x, y) = nn.Sequential(*layers_of(world)).eval(), data()
    expected = nn.functional.mse_loss(model(x), y)
    parts = list(zip(x.tensor_split(6), y.tensor_split(6)))
    layers[rank].train()
    loss, logits = pipe.eval_batch(iter(parts), return_logits=True, num_micro_batches=6)
    assert layers[rank].training and all(p.grad is None for p in layers[rank].parameters())
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    outputs = pipe.eval_batch(iter([(x, None)] * 2), compute_loss=False, num_micro_batches=2)
    if pipe.is_last_stage:
        torch.testing.assert_close(logits, model(x))
        torch.testing.assert_close(outputs, torch.cat([model(x)] * 2))
    else:
        assert logits is None and outputs is None
    each = pipe.eval_batch(iter(parts), reduce_output=None, num_micro_batches=6)
    assert len(each) == 6
    alone = pipe.eval_batch(iter(parts), bcast_loss=False, num_micro_batches=6)
    assert (alone is not None) == pipe.is_last_stage
    pipe.set_dataloader(parts)
    pipe.set_batch_fn(lambda pair: (pair[0] * 1.0, pair[1]))
    assert float(pipe.train_batch()) > 0  # takes four of the loader's six


def test_evaluation_with_other_numbers_of_micro_batches():
    run_ranks(evaluate, 2, backend="dsx")


def ragged(rank, world, dynamic):
    layers = layers_of(world)
    pipe = Pipeline(layers[rank], "1f1b", micro_batches=4, loss_fn=nn.functional.mse_loss, dynamic_shape=dynamic)
    x, y = data(rows=10)  # 3, 3, 2, 2 rows
    with pytest.raises(dsx_pipe.StageError, match="cannot be split into 4 equal micro-batches"):
        pipe.step(x, y)  # its mean would weigh the rows of a small micro-batch more
    assert all(p.grad is None for p in layers[rank].parameters())
    loss = pipe.train_batch(iter(zip(x.tensor_split(4), y.tensor_split(4))))
    model = nn.Sequential(*layers_of(world))
    parts = zip(x.tensor_split(4), y.tensor_split(4))
    assert float(loss) == pytest.approx(sum(float(nn.functional.mse_loss(model(a), b)) for a, b in parts) / 4, rel=1e-6)


def test_ragged_micro_batches_with_dynamic_shape():
    run_ranks(ragged, 2, True, backend="dsx")


def unequal(rank, world):
    layers = layers_of(world)
    pipe = Pipeline(layers[rank], "1f1b", micro_batches=4, loss_fn=nn.functional.mse_loss)
    x, y = data(rows=10)
    pieces = list(zip(x.tensor_split(4), y.tensor_split(4)))
    with pytest.raises(dsx_pipe.StageError, match=r"micro-batch 2 has 2 rows of .*, expected 3 .*dynamic_shape=True"):
        pipe.train_batch(iter(pieces))
    assert pipe.eval_batch(iter(pieces)) > 0  # an evaluation may read what it wants
    layers[rank].zero_grad()
    pipe.reset_activation_shape()
    pipe.train_batch(iter(zip(*(t.tensor_split(4) for t in data(rows=8)))))
    return layers[rank][0].weight.grad


@pytest.mark.parametrize("world", [1, 2])
def test_unequal_micro_batches_are_refused_unless_shapes_may_differ(world):
    assert all(gradient is not None for gradient in run_ranks(unequal, world, backend="dsx"))


def reset(rank, world):
    layers = layers_of(world)
    pipe = Pipeline(layers[rank], "1f1b", micro_batches=2, loss_fn=nn.functional.mse_loss)
    pipe.step(*data())
    pipe.reset_activation_shape()
    pipe.step(*data(rows=8))
    with pytest.raises(
        dsx_pipe.StageError,
        match=r"stage 0 .*micro-batch 0: sending its output failed: .*float64\[4, 6\].*reset_activation_shape",
    ):
        pipe.step(*data())
    pipe.step(*data(rows=8))  # the pipeline goes on after a failed step
    layers[rank].requires_grad_(False).zero_grad()
    pipe.step(*data(rows=8))  # frozen: the same shapes, no gradients
    assert all(p.grad is None for p in layers[rank].parameters())


def test_shapes_may_change_after_a_reset_and_not_without_one():
    run_ranks(reset, 2, backend="dsx")


def without_numpy(rank, world):
    def missing(self, *args, **kwargs):
        raise RuntimeError("Numpy is not available")

    torch.Tensor.numpy = missing  # as in a torch without numpy
    layers = layers_of(world)
    loss = Pipeline(layers[rank], "1f1b", micro_batches=2, loss_fn=nn.functional.mse_loss).step(*data())
    told = [None] * world
    dsx_comm.all_gather_object(told, {"rank": rank, "long": "x" * 100})
    assert [entry["rank"] for entry in told] == [0, 1]
    return float(loss)


def test_ranks_need_no_numpy():
    first, second = run_ranks(without_numpy, 2, backend="dsx")
    assert first == second
