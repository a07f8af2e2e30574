"""The `activation_checkpointing` section takes effect when the engine is built: in models that call
`dsx.checkpointing.checkpoint`, and in pipelines. Losses are those without it.
"""

import logging

import dsx
import pytest
import torch
from dsx.errors import DsxConfigError
from dsx_testkit import run_ranks
from torch import nn


@pytest.fixture(autouse=True)
def _settings_of_before():
    yield
    dsx.checkpointing.configure()


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.layers = call, nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(self.call(layer, x))
        return x.square().mean()


def losses(call, stage, **section):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **section,
    }
    engine, *_ = dsx.initialize(model=Net(call), config=config)
    found = []
    for step in range(3):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


SECTION = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3}


@pytest.mark.parametrize("stage", [0, 3])
def test_the_section_takes_effect_when_the_engine_is_built(stage):
    expected = losses(lambda layer, x: layer(x), stage)
    dsx.checkpointing.configure()
    seen = []

    def call(layer, x):
        from dsx_activations.configured import current

        seen.append(current().settings)
        return dsx.checkpointing.checkpoint(layer, x)

    assert losses(call, stage, activation_checkpointing=SECTION) == expected
    assert set(seen) == {dsx.checkpointing.CheckpointingSettings(True, False, True, 3)}


def test_a_section_without_effect_is_reported(caplog):
    with caplog.at_level(logging.WARNING, "dsx"):
        losses(lambda layer, x: layer(x), 0, activation_checkpointing={"profile": True})
    assert caplog.text.count("never called dsx.checkpointing.checkpoint") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dsx"):
        losses(dsx.checkpointing.checkpoint, 0, activation_checkpointing={"partition_activations": True})
        losses(lambda layer, x: layer(x), 0)
    assert "never called" not in caplog.text


@pytest.mark.parametrize("stage", [0, 3])
def test_a_memory_budget_is_decided_in_the_first_step_and_stored(stage, tmp_path, caplog):
    expected = losses(lambda layer, x: layer(x), stage)
    section = {"activation_checkpointing": {"memory_budget": 0.7}}
    with caplog.at_level(logging.INFO, "dsx"):
        assert losses(lambda layer, x: layer(x), stage, **section) == expected
    assert caplog.text.count("recomputed blocks:") == 1 and "never called" not in caplog.text
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **section}

    def engine():
        return dsx.initialize(model=Net(lambda layer, x: layer(x)), config=config)[0]

    first = engine()
    first.backward(first(torch.randn(2, 6)))
    first.step()
    first.save_checkpoint(tmp_path)
    first.destroy()
    caplog.clear()
    second = engine()
    with caplog.at_level(logging.INFO, "dsx"):
        second.load_checkpoint(tmp_path)
    assert "recomputed blocks:" in caplog.text
    second.destroy()


@pytest.mark.parametrize("wrong", [0, -5, 1.5])
def test_a_budget_that_is_none_is_named(wrong):
    with pytest.raises(DsxConfigError, match="memory_budget"):
        losses(None, 0, activation_checkpointing={"memory_budget": wrong})


def test_settings_that_contradict_each_other_are_named():
    with pytest.raises(DsxConfigError, match="partition_activations"):
        losses(None, 0, activation_checkpointing={"contiguous_memory_optimization": True})


def pipeline(rank, world):
    import dsx
    from dsx_pipe import LayerSpec, PipelineModule

    dsx.init_distributed()

    def run(**section):
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
        module = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), activation_checkpoint_interval=1)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            **section,
        }
        engine, *_ = dsx.initialize(model=module, config=config)
        uses = dsx.checkpointing.use_count()
        generator = torch.Generator().manual_seed(0)
        batches = [(torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)) for _ in range(4)]
        data = iter(batches)
        found = [float(engine.train_batch(data)) for _ in range(2)]
        engine.destroy()
        return found, dsx.checkpointing.use_count() - uses

    plain, none = run()
    kept, uses = run(activation_checkpointing={"partition_activations": True})
    assert plain == kept
    assert none == 0 and uses > 0


def test_a_pipeline_recomputes_through_it():
    run_ranks(pipeline, 2)
