"""Measured layer costs are right, and the planner takes them; every configuration key takes effect."""

import dsx_comm  # noqa: F401
import pytest
import torch
from dsx_pipe import LayerSpec, Pipeline, PipelineError, PipelineModule, measure_layers, plan
from dsx_pipe.errors import PartitionError
from dsx_testkit import run_ranks
from pydantic import ValidationError
from torch import nn


class Clock:
    """A clock that only `Work` moves, so that costs are exact on a busy machine, too."""

    seconds = 0.0

    def now(self):
        return self.seconds


class Work(nn.Module):
    """A layer whose forward takes seconds in proportion to the batch."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds, self.linear = clock, seconds, nn.Linear(4, 4)

    def forward(self, x):
        self.clock.seconds += self.seconds * x.shape[0]
        return self.linear(x)


def test_measured_costs(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("dsx_pipe.measure._now", clock.now)
    layers = [LayerSpec(Work, clock, 0.004), torch.tanh, LayerSpec(Work, clock, 0.012)]
    costs = measure_layers(layers, torch.randn(4, 4), repeats=1)
    assert [cost.forward for cost in costs] == pytest.approx([0.004, 0.0, 0.012])
    assert costs[0].parameter_bytes == 20 * 16 and costs[1].parameter_bytes == 0
    assert costs[0].activation_bytes == 16  # four floats of the input per sample
    assert plan(costs * 2, 2, 8).parts[-1] == 6
    with pytest.raises(PartitionError, match="at least two samples"):
        measure_layers(layers, torch.randn(1, 4))


def by_time(rank, world):
    pm = PipelineModule(
        [nn.Linear(4, 4) for _ in range(4)], 2, partition_method="time", layer_times=[0.001, 0.001, 0.001, 0.003]
    )
    return pm.parts


def test_partition_by_measured_time():
    assert run_ranks(by_time, 2, backend="dsx") == [[0, 3, 4]] * 2


def different_layers(rank, world):
    layers = [nn.Linear(4, 4), nn.Tanh() if rank else nn.ReLU(), nn.Linear(4, 4)]
    with pytest.raises(PipelineError, match="rank 1 has 3, and layer 1 differs"):
        PipelineModule(layers, num_stages=2)


def test_ranks_with_different_layers_are_named():
    run_ranks(different_layers, 2, backend="dsx")


def test_pipeline_section():
    from dsx_pipe.config import Pipeline as Section

    assert Section().module_options() == {}
    options = Section(
        stages=2, partition="uniform", seed_layers=True, activation_checkpoint_interval=3, use_reentrant=False
    )
    found = options.module_options()
    assert found.pop("activation_checkpoint_func").keywords == {"use_reentrant": False}
    assert found == {
        "num_stages": 2,
        "partition_method": "uniform",
        "seed_layers": True,
        "activation_checkpoint_interval": 3,
    }
    for bad in ({"stages": 0}, {"stage": 2}, {"seed_layers": 1}):
        with pytest.raises(ValidationError):
            Section(**bad)


def from_section(rank, world, reentrant):
    from dsx_pipe.config import Pipeline as Section

    section = Section(
        stages=2, partition="uniform", seed_layers=True, activation_checkpoint_interval=1, use_reentrant=reentrant
    )
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    pm = PipelineModule(layers, loss_fn=nn.functional.mse_loss, **section.module_options())
    x = torch.randn(4, 4)
    loss = Pipeline(pm, "1f1b", micro_batches=2).step(x, x)
    plain = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform")
    assert float(Pipeline(plain, "1f1b", micro_batches=2).step(x, x)) == pytest.approx(float(loss))
    for p, q in zip(pm.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("reentrant", (True, False))
def test_a_module_made_from_a_section(reentrant):
    run_ranks(from_section, 2, reentrant, backend="dsx")


def test_tensor_parallel_section():
    from dsx_pipe.config import TensorParallel
    from dsx_pipe.tensor.rules import rules_of

    section = TensorParallel(
        autotp_size=2, tp_overlap_comm=True, partition_config={"layer_specs": [{"patterns": ["qkv"], "shape": [3, -1]}]}
    )
    options = section.slice_options()
    assert options["overlap"] is True and rules_of(options["config"])[0].parts == 3
    off = {"preset": None, "config": None, "overlap": False, "sequence_parallel": False}
    assert TensorParallel().slice_options() == off
    assert TensorParallel(sequence_parallel=True).slice_options() == {**off, "sequence_parallel": True}
    with pytest.raises(ValidationError):
        TensorParallel(autotp_sizes=2)
    with pytest.raises(ValidationError, match="unknown key 'pattern'"):
        TensorParallel(partition_config={"layer_specs": [{"pattern": ["qkv"]}]})
