"""`micro_steps` counts micro-batches, whether `step()` follows each of them or only the last one of an update."""

import pytest
import torch


def engine_of(accumulation):
    import dsx

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
    }
    return dsx.initialize(model=torch.nn.Linear(2, 1), config=settings)[0]


def backward(engine):
    engine.backward(engine(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_step_after_every_micro_batch(accumulation):
    engine = engine_of(accumulation)
    for count in range(1, 2 * accumulation + 1):
        backward(engine)
        engine.step()
        assert engine.micro_steps == count
    assert engine.global_steps == 2


@pytest.mark.parametrize("accumulation", [1, 3])
def test_step_at_boundaries_only_with_the_boundary_set_by_hand(accumulation):
    engine = engine_of(accumulation)
    for update in range(1, 3):
        for micro_batch in range(accumulation):
            engine.set_gradient_accumulation_boundary(is_boundary=micro_batch == accumulation - 1)
            backward(engine)
        engine.step()
        assert (engine.micro_steps, engine.global_steps) == (update * accumulation, update)


def test_two_backwards_of_one_micro_batch_are_one():
    engine = engine_of(2)
    for count in range(1, 5):
        backward(engine)
        backward(engine)
        engine.step()
        assert engine.micro_steps == count


def test_dropped_micro_batches_do_not_count():
    engine = engine_of(4)
    backward(engine)
    engine.forget_micro_batches()
    engine.set_gradient_accumulation_boundary(True)
    backward(engine)
    engine.step()
    assert engine.micro_steps == 1
