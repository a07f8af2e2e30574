"""`largest.py`: the deepest model that `dsx plan` promises in a part of the memory here, by placement, and trained.

The plan and the training have the same limit: a process may use so much of the device, and the host has so much for its
states. A model that the plan promises and that does not train is a fault; so the answer of `dsx plan --largest` is held
against a device in minutes, whatever its size.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from dsx.planning import Machine, largest
from dsx_testkit.benches import GPT, batch
from records import SIMULATED, one_rank, record, recorded
from training import config, engine_of, engine_step

# (width, heads, vocabulary, length), bytes of the device and of the host
SHAPE, DEVICE, HOST = ((64, 4, 256, 32), 4 << 20, 4 << 20) if SIMULATED else ((1024, 16, 50304, 512), 3 << 30, 16 << 30)
_HOST = {"device": "cpu", "pin_memory": True}
PLACES: Mapping[str, Mapping[str, Any]] = {
    "on the device": {},
    "optimizer on host": {"zero_optimization.offload_optimizer": _HOST},
    "parameters on host": {
        "zero_optimization.offload_optimizer": _HOST,
        "zero_optimization.offload_param": _HOST,
    },
}
STEPS = 2


def family(blocks: int) -> torch.nn.Module:
    """A model of so many blocks."""
    width, heads, vocabulary, length = SHAPE
    torch.manual_seed(0)
    return GPT(width, blocks, heads, vocabulary, length)


def settings(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a placement."""
    found = config(3, "bf16", "none", "", clip=1.0)
    found["train_micro_batch_size_per_gpu"] = 1
    for path, value in changes.items():
        section, key = path.split(".")
        found[section][key] = value
    return found


def trained(blocks: int, changes: Mapping[str, Any], data: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Train a model of so many blocks. Returns the most bytes of the device that it held."""
    torch.cuda.reset_peak_memory_stats()
    engine = engine_of(family(blocks), settings(changes))
    step = engine_step(engine, lambda number: data)
    for number in range(STEPS):
        step(number)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    engine.destroy()
    torch.cuda.empty_cache()
    return peak


def answers(machine: Machine, example: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """For each placement the deepest model that the plan promises. Planning comes before the process group."""
    found = {}
    for name, changes in PLACES.items():
        with recorded(name):
            found[name] = largest(
                family, settings({}), world_size=1, machine=machine, batch=example, recompute=False,
                settings={name: changes}, start=2,
            ).best  # fmt: skip
    return found


def main() -> int:
    """Each placement: ask the plan, and train what it answers."""
    example = batch(0, 0, size=1, length=SHAPE[3])
    here = Machine.named("H100-SXM") if SIMULATED else Machine.of_this_host()
    machine = replace(here, memory_bytes=DEVICE, host_memory_bytes=HOST, ranks_per_host=1, communicator_bytes=1)
    promised = answers(machine, example)
    with one_rank():
        if not SIMULATED:
            torch.cuda.set_per_process_memory_fraction(DEVICE / torch.cuda.get_device_properties(0).total_memory)
        data = example[0].cuda(), example[1].cuda()
        for name, best in promised.items():
            with recorded(name):
                try:
                    peak = trained(best.size, PLACES[name], data)
                except torch.cuda.OutOfMemoryError as error:
                    record(name, "bad", f"{best.size} blocks were promised and do not fit: {error}")
                    continue
                verdict = "noted" if SIMULATED else "good"
                record(
                    name, verdict, blocks=best.size, parameters=best.plan.parameters, peak_bytes=peak,
                    planned_bytes=best.plan.peak_bytes, limit_bytes=DEVICE,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
