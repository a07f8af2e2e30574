"""`managed_gradient_accumulation: false`: every `step()` ends an update. `disable_python_gc`: garbage is collected
between steps.
"""

import gc

import dsx
import pytest
import torch
from torch import nn


def build(**section):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0,
        **section,
    }
    return dsx.initialize(model=nn.Linear(4, 1), config=config)[0]


def batches(number):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_caller_decides_when_an_update_ends(stage):
    engine = build(managed_gradient_accumulation=False, zero_optimization={"stage": stage})
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    data = iter(batches(6))
    for count in (1, 3, 2):  # micro-batches of the three updates
        for _ in range(count):
            x = next(data)
            loss = engine(x).square().mean() / count
            assert engine.is_gradient_accumulation_boundary()
            engine.backward(loss)
            (plain(x).square().mean() / count).backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps == 3
    state = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    engine.destroy()


def test_the_garbage_collector_runs_between_steps_only():
    assert gc.isenabled()
    collected = []
    engine = build(disable_python_gc=True)
    gc.callbacks.append(lambda phase, info: collected.append((phase, inside)))
    inside = True
    try:
        assert not gc.isenabled()
        for x in batches(3):
            inside = True
            cycles = [[] for _ in range(5000)]
            for cycle in cycles:
                cycle.append(cycle)
            del cycles, cycle
            engine.backward(engine(x).square().mean())
            inside = False
            engine.step()
    finally:
        gc.callbacks.pop()
    assert collected and not any(within for _, within in collected)
    engine.destroy()
    assert gc.isenabled()
