"""After a load at the same number of ranks, the next steps are bit for bit those of the run that went on: order of the
data, dropout, loss scale, schedule, and the states of registered objects.
"""

import random

import numpy as np
import pytest
import torch
from dsx_testkit import run_ranks

SAMPLES, STEPS = 36, 4


def dataset():
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, x.sum(dim=1, keepdim=True))


def build(stage, world, seed=0, **changes):
    import dsx

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 9), torch.nn.Dropout(0.3), torch.nn.LayerNorm(9), torch.nn.Tanh(), torch.nn.Linear(9, 1)
    )
    config = {
        "train_batch_size": 6 * world,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **changes,
    }
    return dsx.initialize(model=model, training_data=dataset(), config=config)[0]


class Average:
    """A registered object: the mean of what it has seen, and noise of its own generator."""

    def __init__(self):
        self.seen = torch.zeros(())
        self.noise = torch.Generator().manual_seed(11)

    def add(self, loss):
        self.seen += loss.detach().float() + torch.rand((), generator=self.noise)

    def state_dict(self):
        return {"seen": self.seen.clone(), "noise": self.noise.get_state()}

    def load_state_dict(self, state):
        self.seen = state["seen"].clone()
        self.noise.set_state(state["noise"])


def train(engine, batches, average, steps):
    """Everything that could differ: samples, losses, draws of all generators, rates, scales, and the object's state."""
    seen = []
    for _ in range(2 * steps):
        ids, x, y = next(batches)
        dtype = next(engine.module.parameters()).dtype
        loss = torch.nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        average.add(loss)
        draws = (random.random(), np.random.rand(), torch.rand(()).item())
        seen.append((ids.tolist(), loss.item(), draws, engine.get_lr(), engine.loss_scale(), average.seen.item()))
    return seen


def start(stage, world, seed, workers=0, **changes):
    import dsx

    engine, average = build(stage, world, seed, **changes), Average()
    if workers:
        engine.training_dataloader = engine.deepspeed_io(dataset(), num_local_io_workers=workers)
    engine.register_for_checkpointing(average, name="average", per_rank=True)
    return engine, average, dsx.RepeatingLoader(engine.training_dataloader)


def go_on_and_resume(rank, world, folder, stage, changes, workers=0):
    engine, average, batches = start(stage, world, 0, workers, **changes)
    train(engine, batches, average, STEPS)
    engine.save_checkpoint(folder, asynchronous=stage == 1)
    expected = train(engine, batches, average, STEPS)
    weights = engine.module_state_dict()
    engine.destroy()
    engine, average, batches = start(stage, world, 9, workers, **changes)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    got = train(engine, batches, average, STEPS)
    after = engine.module_state_dict()
    return expected, got, all(torch.equal(after[name], value) for name, value in weights.items())


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}}


@pytest.mark.parametrize("world, stage, changes", [(1, 0, {}), (2, 1, BF16), (2, 3, {}), (1, 2, FP16)])
def test_the_next_steps_are_those_of_the_run_that_went_on(tmp_path, world, stage, changes):
    for expected, got, weights in run_ranks(go_on_and_resume, world, str(tmp_path), stage, changes):
        assert got == expected
        assert weights


def test_worker_processes_of_a_loader_do_not_disturb_the_generators(tmp_path):
    ((expected, got, weights),) = run_ranks(go_on_and_resume, 1, str(tmp_path), 0, {}, 1)
    assert got == expected and weights


def save_here(rank, world, folder):
    engine, average, batches = start(0, world, 0)
    train(engine, batches, average, 1)
    engine.save_checkpoint(folder)


def load_there(rank, world, folder):
    engine, average, _ = start(0, world, 3)
    before = (torch.get_rng_state(), average.seen.clone())
    path, _ = engine.load_checkpoint(folder)
    return path is not None and torch.equal(before[0], torch.get_rng_state()) and average.seen == before[1]


def test_at_another_number_of_ranks_what_belongs_to_a_rank_begins_anew(tmp_path):
    run_ranks(save_here, 1, str(tmp_path))
    assert all(run_ranks(load_there, 2, str(tmp_path)))


def test_streams_of_model_parallelism_go_on(tmp_path):
    from dsx_activations import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    engine, tracker = build(0, 1), get_cuda_rng_tracker()
    model_parallel_cuda_manual_seed(5)
    engine.save_checkpoint(tmp_path)

    def draw():
        with tracker.fork():
            return torch.rand(3)

    expected = draw()
    engine.load_checkpoint(tmp_path)
    assert torch.equal(draw(), expected)
    tracker.reset()


def test_random_states_can_be_left_alone(tmp_path):
    engine = build(0, 1)
    engine.save_checkpoint(str(tmp_path))
    torch.manual_seed(77)
    expected = torch.get_rng_state()
    engine.load_checkpoint(str(tmp_path), load_random_states=False)
    assert torch.equal(torch.get_rng_state(), expected)
    engine.load_checkpoint(str(tmp_path))
    assert not torch.equal(torch.get_rng_state(), expected)


# - Registered objects


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_registered_objects_are_saved_and_loaded_by_name(tmp_path, caplog):
    engine = build(0, 1)
    engine.register_for_checkpointing(Counter(3), Counter(4))
    engine.register_for_checkpointing(Counter(5), name="best")
    engine.save_checkpoint(str(tmp_path))
    other, first, second, third = build(0, 1), Counter(), Counter(), Counter(9)
    other.register_for_checkpointing(first, second)
    other.register_for_checkpointing(third, name="another")
    other.load_checkpoint(str(tmp_path))
    assert (first.value, second.value, third.value) == (3, 4, 9)
    assert any("no state of the registered another" in m for m in caplog.messages)
    assert any("states of best" in m and "register_for_checkpointing" in m for m in caplog.messages)


def test_what_cannot_be_registered_is_refused():
    engine, counter = build(0, 1), Counter()
    with pytest.raises(ValueError, match="got int, expected objects with state_dict"):
        engine.register_for_checkpointing(3)
    with pytest.raises(ValueError, match="got Counter, expected objects"):
        engine.register_for_checkpointing(Counter)
    with pytest.raises(ValueError, match="got 2 objects, expected one"):
        engine.register_for_checkpointing(Counter(), Counter(), name="two")
    engine.register_for_checkpointing(counter, name="one")
    with pytest.raises(ValueError, match="is taken"):
        engine.register_for_checkpointing(Counter(), name="one")
    with pytest.raises(ValueError, match="registered already"):
        engine.register_for_checkpointing(counter)


def test_a_registered_object_that_fails_to_load_changes_nothing(tmp_path):
    class Fails(Counter):
        def load_state_dict(self, state):
            if state["value"] == 3:
                raise KeyError("value")
            super().load_state_dict(state)

    engine = build(0, 1)
    engine.register_for_checkpointing(Counter(1), name="a")
    engine.register_for_checkpointing(Counter(3), name="b")
    engine.save_checkpoint(str(tmp_path))
    other, a = build(0, 1, seed=5), Counter(8)
    other.register_for_checkpointing(a, name="a")
    other.register_for_checkpointing(Fails(4), name="b")
    weights, state = other.module_state_dict(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="training state is damaged"):
        other.load_checkpoint(str(tmp_path))
    assert a.value == 8 and other.global_steps == 0 and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, weights[name]) for name, value in other.module_state_dict().items())


def test_a_loader_of_the_caller_with_a_state_goes_on_for_each_rank(tmp_path):
    class Positioned(Counter):
        def __iter__(self):
            while True:
                self.value += 1
                yield self.value

    engine = build(0, 1)
    engine.training_dataloader = Positioned()
    batches = iter(engine.training_dataloader)
    [next(batches) for _ in range(5)]
    engine.save_checkpoint(str(tmp_path))
    other = build(0, 1)
    other.training_dataloader = Positioned()
    other.load_checkpoint(str(tmp_path))
    assert next(iter(other.training_dataloader)) == 6


def test_the_checkpoint_says_with_which_configuration_and_versions_it_was_saved(tmp_path):
    from dsx.checkpoint import open_checkpoint

    engine = build(1, 1, comet={"enabled": False, "api_key": "secret"})
    engine.save_checkpoint(str(tmp_path))
    state = open_checkpoint(tmp_path).index.state["engine"]
    assert state["config"]["zero_optimization"]["stage"] == 1 and "secret" not in str(state["config"])
    assert state["versions"]["torch"] == str(torch.__version__)
    assert state["layout"] == {"ranks": 1, "zero_stage": 1, "placement": {"parameters": "none", "optimizer": "none"}}
