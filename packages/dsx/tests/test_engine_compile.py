"""The `compile` section and `engine.compile()`: blocks are compiled, training is that of the plain engine, nothing is
compiled again.
"""

import dsx
import pytest
import torch
from dsx.errors import DsxConfigError
from dsx_zero import ZeroModelError
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


def losses(stage, then=None, **section):
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **section,
    }
    engine, *_ = dsx.initialize(model=Net(), config=config)
    if then is not None:
        then(engine)
    found = []
    for step in range(4):
        with dynamo.config.patch(error_on_recompile=step >= 2):
            loss = engine(torch.randn(2, 6, generator=torch.Generator().manual_seed(step)))
            engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert not counters["graph_break"], dict(counters["graph_break"])
    graphs, compiled = counters["stats"]["unique_graphs"], engine.is_compiled
    engine.destroy()
    return found, graphs, compiled


@pytest.mark.parametrize("stage", [0, 3])
def test_the_section_compiles_blocks(stage):
    plain, none, compiled = losses(stage)
    assert none == 0 and not compiled
    found, graphs, compiled = losses(
        stage,
        compile={"enabled": True, "backend": "aot_eager", "kwargs": {"fullgraph": True}},
        activation_checkpointing={"memory_budget": 0.7},
    )
    assert found == pytest.approx(plain, rel=1e-5) and 1 <= graphs <= 2 and compiled
    again, graphs, _ = losses(stage, lambda engine: engine.compile("aot_eager", {"fullgraph": True}))
    assert again == pytest.approx(plain, rel=1e-5) and 1 <= graphs <= 2


def test_a_memory_budget_alone_is_no_compilation():
    assert losses(0, activation_checkpointing={"memory_budget": 0.7})[2] is False


def test_mistakes_are_named():
    with pytest.raises(ZeroModelError, match="aot_eager"):
        losses(0, compile={"enabled": True, "backend": "nothing"})
    with pytest.raises(DsxConfigError, match=r"compile\.kwargs"):
        losses(0, compile={"enabled": True, "kwargs": 3})
