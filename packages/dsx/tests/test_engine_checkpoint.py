"""The engine goes on where another one stopped: another stage, another number of ranks, the same losses and samples."""

import functools

import pytest
import torch
from dsx_testkit import run_ranks

SAMPLES = 24


def config(stage, world, **changes):
    return {
        "train_batch_size": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **changes,
    }


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, x.sum(dim=1, keepdim=True))


def build(stage, world, seed=0, **changes):
    import dsx

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    return dsx.initialize(model=model, training_data=dataset(), config=config(stage, world, **changes))[0]


def batches_of(engine):
    import dsx

    return dsx.RepeatingLoader(engine.training_dataloader)


def train(engine, batches, steps):
    """Sample numbers and local losses of `steps` updates, over as many epochs as it takes."""
    seen, losses = [], []
    for _ in range(steps):
        ids, x, y = next(batches)
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        seen.append(ids.tolist())
        losses.append(loss.item())
    return seen, losses


def save_and_go_on(rank, world, folder):
    engine = build(2, world)
    batches = batches_of(engine)
    train(engine, batches, 3)
    path = engine.save_checkpoint(folder, client_state={"note": "here", "values": torch.arange(3)})
    assert path.endswith("global_step3")
    return train(engine, batches, 3)


def resume(rank, world, stage, folder):
    engine = build(stage, world, seed=9)
    path, client = engine.load_checkpoint(folder)
    assert client["note"] == "here" and torch.equal(client["values"], torch.arange(3)) and path.endswith("global_step3")
    assert (engine.global_steps, engine.global_samples) == (3, 18)
    return train(engine, batches_of(engine), 3)


def together(ranks):
    """Samples and mean loss of each global batch."""
    samples = [sorted(i for seen, _ in ranks for i in seen[step]) for step in range(3)]
    return samples, [sum(losses[step] for _, losses in ranks) / len(ranks) for step in range(3)]


@functools.lru_cache
def saved(folder):
    return together(run_ranks(save_and_go_on, 2, folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("ckpt"))


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 3), (3, 1)])
def test_training_goes_on_with_other_ranks_and_stages(folder, world, stage):
    samples, losses = saved(folder)
    got_samples, got_losses = together(run_ranks(resume, world, stage, folder))
    assert got_samples == samples
    assert got_losses == pytest.approx(losses, rel=1e-4)


def test_parts_of_a_checkpoint(folder, tmp_path):
    saved(folder)
    weights_only = build(0, 1, seed=9)
    path, _ = weights_only.load_checkpoint(folder, load_module_only=True)
    assert path and weights_only.global_steps == 0
    fresh_rates = build(0, 1, seed=9)
    before = fresh_rates.get_lr()
    fresh_rates.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert fresh_rates.get_lr() == before and fresh_rates.global_steps == 3
    assert build(0, 1).load_checkpoint(str(tmp_path)) == (None, {})


# - Rates


def rates_of(folder, scheduler, steps=3, by_hand=None):
    """Rates of six updates in one run, and of a run that is stopped after three and resumed."""
    import dsx

    def make():
        torch.manual_seed(0)
        settings = {
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5}},
            "scheduler": scheduler,
            "steps_per_print": None,
        }
        return dsx.initialize(model=torch.nn.Linear(2, 1), config=settings)[0]

    def run(engine, count):
        seen = []
        for _ in range(count):
            if by_hand:
                by_hand(engine.optimizer.param_groups, engine.global_steps)
            seen.append((engine.get_lr()[0], engine.get_mom()[0]))
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        return seen

    expected = run(make(), 2 * steps)
    first = make()
    before = run(first, steps)
    first.save_checkpoint(folder)
    second = make()
    second.load_checkpoint(folder)
    return expected, before + run(second, steps)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
        {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
        {"type": "MultiStepLR", "params": {"milestones": [1, 4], "gamma": 0.5}},
        {"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 4}},
        {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    ],
)
def test_schedules_of_torch_go_on_with_the_rate_they_had(tmp_path, scheduler):
    expected, got = rates_of(str(tmp_path), scheduler)
    assert [lr for lr, _ in got] == pytest.approx([lr for lr, _ in expected])
    assert [mom for _, mom in got] == pytest.approx([mom for _, mom in expected])


def test_rates_set_by_hand_are_kept(tmp_path):
    def by_hand(groups, step):
        if step == 1:
            groups[0]["lr"], groups[0]["momentum"] = 0.25, 0.125

    expected, got = rates_of(str(tmp_path), None, by_hand=by_hand)
    assert got == expected and got[-1] == (0.25, 0.125)


def test_a_load_in_the_middle_of_an_update_begins_a_new_one(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "train_batch_size": 6, "scheduler": None}
    engine = build(0, 1, **settings)
    engine.save_checkpoint(str(tmp_path))
    x = torch.ones(3, 4)
    engine.backward(engine(x).sum())
    engine.step()  # the first of two
    engine.load_checkpoint(str(tmp_path))
    assert not engine.is_gradient_accumulation_boundary()
    for _ in range(2):
        engine.backward(engine(x).sum())
        engine.step()
    assert engine.global_steps == 1 and engine.last_step.loss == pytest.approx(expected_loss(x), rel=1e-5)


def expected_loss(x):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    return model(x).sum().item()


def test_a_tag_may_be_a_number(tmp_path):
    engine = build(0, 1)
    assert engine.save_checkpoint(str(tmp_path), tag=7).endswith("7")
    path, _ = engine.load_checkpoint(str(tmp_path), tag=7)
    assert path is not None and path.endswith("7")


def test_the_precision_stands_in_the_checkpoint_and_another_one_is_said(tmp_path, caplog):
    from dsx.checkpoint import open_checkpoint

    engine = build(0, 1, scheduler=None, bf16={"enabled": True})
    engine.save_checkpoint(str(tmp_path))
    assert open_checkpoint(tmp_path).index.state["engine"]["precision"]["params"] == "bf16"
    other = build(0, 1, scheduler=None)
    with caplog.at_level("INFO", logger="dsx"):
        other.load_checkpoint(str(tmp_path))
    assert [m for m in caplog.messages if "saved in another precision: params bf16 (now fp32)" in m]
