"""The engine is an nn.Module: programs that take any module can hold, hook, unwrap and compile it."""

import pytest
import torch
from dsx_testkit import run_ranks


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("shift", torch.ones(6))
        self.greeting = "hello"

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.shift

    def greet(self, name):
        return f"{self.greeting} {name}"


def build(stage=0, net=None):
    import dsx

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }
    return dsx.initialize(model=net or Net(), config=settings)[0]


def test_it_is_a_module_with_one_child_and_the_childs_names():
    net = Net()
    engine = build(net=net)
    assert isinstance(engine, torch.nn.Module) and engine.module is net
    assert [name for name, _ in engine.named_children()] == ["module"]
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert list(engine.state_dict()) == list(net.state_dict()) and "shift" in dict(engine.named_buffers())
    assert list(engine.parameters()) == list(net.parameters()) and list(engine.buffers()) == list(net.buffers())
    engine.load_state_dict(engine.state_dict())
    assert net in list(engine.modules()) and engine.device == torch.device("cpu")


def test_unknown_attributes_are_those_of_the_module():
    engine = build()
    assert engine.greet("you") == "hello you" and engine.greeting == "hello"
    with pytest.raises(AttributeError, match="neither the engine nor its module"):
        engine.greeting_of_the_day
    engine.module._private = "of the module"
    with pytest.raises(AttributeError, match="_private"):
        engine._private
    assert not hasattr(engine, "generate")


def test_the_mode_is_the_modules_whoever_sets_it():
    engine = build()
    assert engine.train(False) is engine and not engine.module.training and not engine.training
    engine.module.train()
    assert engine.training and engine.eval() is engine and not engine.module.layers[0].training


def test_hooks_of_the_engine_run_around_its_forward():
    engine, seen = build(), []
    before = engine.register_forward_pre_hook(lambda module, args: seen.append("before"))
    engine.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    engine(torch.ones(2, 6))
    before.remove()
    engine(torch.ones(1, 6))
    assert seen == ["before", (2, 6), (1, 6)]


def losses(rank, world, stage, compiled):
    engine = build(stage)
    if compiled:
        engine.compile(backend="aot_eager")
        assert engine.is_compiled
    found = []
    for step in range(3):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_engine_trains_as_an_uncompiled_one(stage):
    plain = run_ranks(losses, 2, stage, False)
    assert run_ranks(losses, 2, stage, True, timeout=150) == [pytest.approx(of_rank, rel=1e-5) for of_rank in plain]


def compiled_names(rank, world):
    import dsx_zero

    engine = build(3)
    return dsx_zero.compile_units(engine.module, backend="eager")


def test_stage_3_is_compiled_unit_by_unit():
    assert run_ranks(compiled_names, 2) == [("layers.0", "layers.1", "layers.2")] * 2


def test_a_schedule_of_graph_passes_is_refused():
    with pytest.raises(ValueError, match="schedule"):
        build().compile(schedule=[])
