"""Costs of the layers of a pipeline, by the cost model: for `dsx_pipe.plan` and `dsx-pipe plan`, without measuring."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .cost import simulate
from .fake import FakeCompute
from .machine import Machine
from .planner import MachineLike
from .recorder import Recorder
from .surroundings import DeviceAttention

__all__ = ["layer_costs"]


def layer_costs(layers: Any, inputs: Any, *, machine: MachineLike, state_bytes_per_parameter: int = 16) -> list[Any]:
    """The cost of each layer for one sample on a machine: `dsx_pipe.measure_layers`, with planned times.

    Layers and batch are run on CPU tensors of which large ones have no contents, so neither the machine nor its memory
    is needed here.

    Args:
        layers: as for `PipelineModule`.
        inputs: a batch for the first layer, of at least two samples.
        machine: a `Machine`, a name of the table, a file, or None: this machine.
        state_bytes_per_parameter: bytes of parameter, gradient and optimizer states per element.

    Returns:
        `dsx_pipe.planner.LayerCost` for each layer, in their order.

    Raises:
        MachineError: the machine is not known.
        PartitionError: the batch has fewer than two samples.
    """
    import dsx_pipe  # lazy import: other plans do not need it

    found = Machine.of(machine)
    recorder = Recorder(ranks_per_host=1, streams=found.streams)

    def planned_seconds() -> float:
        return simulate(recorder.trace, [(0, len(recorder.trace), 1)], found, ranks_per_host=1).step

    with contextlib.ExitStack() as stack:
        stack.enter_context(recorder.ledger.following_resizes())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(FakeCompute(recorder))
        if found.streams:
            stack.enter_context(DeviceAttention())
        return dsx_pipe.measure_layers(
            layers, inputs, repeats=1, state_bytes_per_parameter=state_bytes_per_parameter, clock=planned_seconds
        )
