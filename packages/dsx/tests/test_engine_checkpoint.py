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
    with pytest.raises(ValueError, match="custom_load_fn"):
        build(0, 1).load_checkpoint(folder, custom_load_fn=print)
