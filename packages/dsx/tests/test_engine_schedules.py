"""The learning rate each update runs with: the start, no step after a skipped update, momentum too."""

import math

import pytest
import torch
from dsx.engine.stepper import ScheduleDriver
from dsx_testkit import run_ranks


def config(**changes):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "steps_per_print": None,
        **changes,
    }


def rates(settings, steps, make=None, lr_kwargs=None):
    import dsx

    engine, _, _, scheduler = dsx.initialize(model=torch.nn.Linear(2, 1), config=settings, lr_scheduler=make)
    assert scheduler is engine.lr_scheduler
    seen = []
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 2)).sum())
        seen.append((engine.get_lr()[0], engine.get_mom()[0]))
        engine.step(lr_kwargs)
        assert engine.last_step.lr == (seen[-1][0],)
    return seen


def test_updates_use_the_published_sequence():
    settings = config(
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}}
    )
    seen = rates(settings, 6)
    assert [lr for lr, _ in seen] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]


def test_one_cycle_sets_momentum_too():
    params = {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_first_step_size": 3,
        "decay_lr_rate": 0.5,
        "decay_step_size": 1,
    }
    seen = rates(config(scheduler={"type": "OneCycle", "params": params}), 8)
    assert [lr for lr, _ in seen] == pytest.approx([0.01, 0.04, 0.07, 0.1, 0.07, 0.04, 0.01, 0.02 / 3])
    assert [mom[0] for _, mom in seen][:4] == pytest.approx([0.8, 0.86666667, 0.83333333, 0.8])


def test_a_schedule_of_torch_by_name_steps_as_in_torch():
    settings = config(scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}})
    seen = rates(settings, 5)
    assert [lr for lr, _ in seen] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_callable_and_arguments_of_step():
    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    seen = rates(config(), 3, plateau, {"metrics": 1.0})
    assert [lr for lr, _ in seen] == pytest.approx([1.0, 1.0, 0.1])


def client_objects(rank, world):
    import dsx

    net = torch.nn.Linear(2, 1)
    mine = torch.optim.SGD(net.parameters(), lr=4.0, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(mine, 0.5)
    settings = config(scheduler={"type": "WarmupLR", "params": {}})
    engine, optimizer, _, got = dsx.initialize(model=net, optimizer=mine, lr_scheduler=schedule, config=settings)
    assert got is schedule and optimizer.inner is mine and engine.get_type() == "SGD"
    assert engine.get_mom() == [0.5]
    seen = []
    for _ in range(3):
        seen.append(engine.get_lr()[0])
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return seen


def test_objects_of_the_caller_win_over_the_config():
    assert run_ranks(client_objects, 2) == [[4.0, 2.0, 1.0]] * 2


def test_arguments_for_a_scheduler_that_is_not_there_are_refused():
    ScheduleDriver(None).step()
    with pytest.raises(ValueError, match="no learning-rate scheduler"):
        ScheduleDriver(None).step(metrics=1.0)


def test_a_schedule_that_was_stepped_already_is_not_stepped_again():
    class Stepped:
        last_batch_iteration = 3
        steps = 0

        def step(self):
            self.steps += 1

    schedule = Stepped()
    ScheduleDriver(schedule)
    assert schedule.steps == 0


def test_a_class_of_schedules_makes_one_as_any_callable():
    from functools import partial

    seen = rates(config(), 3, partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5))
    assert [lr for lr, _ in seen] == [1.0, 0.5, 0.25]

    class Halving(torch.optim.lr_scheduler.ExponentialLR):
        def __init__(self, optimizer):
            super().__init__(optimizer, 0.5)

    assert [lr for lr, _ in rates(config(), 3, Halving)] == [1.0, 0.5, 0.25]


def test_names_are_found_in_any_case():
    settings = config(
        scheduler={"type": "steplr", "params": {"step_size": 1, "gamma": 0.5}},
        optimizer={"type": "rmsprop", "params": {"lr": 1.0}},
    )
    assert [lr for lr, _ in rates(settings, 2)] == [1.0, 0.5]


def test_a_schedule_without_an_optimizer_is_said(caplog):
    import dsx

    settings = {"train_batch_size": 1, "scheduler": {"type": "WarmupLR"}, "steps_per_print": None}
    with caplog.at_level("WARNING", logger="dsx"):
        assert dsx.initialize(model=torch.nn.Linear(2, 1), config=settings)[3] is None
    assert "scheduler is not used: this engine has no optimizer" in caplog.text


class Halved(torch.optim.Optimizer):
    """Its groups have no learning rate, or None."""

    def __init__(self, params, **defaults):
        super().__init__(params, defaults)

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.5 * parameter.grad)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=["no lr", "lr=None"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_group_without_a_learning_rate_trains(stage, defaults, tmp_path):
    import dsx

    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    settings = {"train_batch_size": 1, "gradient_clipping": 0, "zero_optimization": {"stage": stage}}
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = Halved(model.parameters(), **defaults)
    engine, *_ = dsx.initialize(model=model, optimizer=optimizer, config=settings | {"csv_monitor": csv})
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert math.isnan(engine.get_lr()[0]) and math.isnan(engine.last_step.lr[0])  # 0.0 would say that it stands still
    assert torch.equal(engine.module.weight.detach(), before - 0.5)
    engine.destroy()
    written = {path.stem for path in (tmp_path / "run").glob("*.csv")}
    assert "Train_Samples_train_loss" in written and "Train_Samples_lr" not in written
