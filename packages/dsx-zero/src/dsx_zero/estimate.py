"""Estimates of the memory of model states per device and per host, by the published formulas of DeepSpeed.

They describe mixed precision with Adam as DeepSpeed stores it (18 bytes per parameter). dsx-zero itself holds less (16
bytes per parameter), and `ZeroOptimizer.state_bytes` counts it. Sizes are bytes; tables are printed, and returned as
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

__all__ = [
    "MemoryNeeds",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


class MemoryNeeds(NamedTuple):
    """Bytes per host and per device; `largest_layer` is the part of the latter that the largest layer takes (stage
    3).
    """

    cpu: int
    gpu: int
    largest_layer: int


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(host bytes per node, bytes per device) for stages 1-2, by the formulas that DeepSpeed's documents publish.

    P parameters, G devices, g per node, factor f. Offload: device 2P, host P max(4G, 16) f. Else: device 2P + 18P/G,
    host 4P g f. `optimizer.state_bytes()` counts what dsx holds, and `dsx plan` predicts it before a run.

    Args:
        total_params: number of parameters, not bytes.
        num_gpus_per_node, num_nodes: the devices among which state is divided.
        cpu_offload: whether `offload_optimizer` is "cpu".
        additional_buffer_factor: by how much host memory is more than what must be held.
    """
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * total_gpus, 16) * additional_buffer_factor), 2 * total_params
    cpu = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu), 2 * total_params + int(18 * total_params / total_gpus)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> MemoryNeeds:
    """Bytes for stage 3, by the formulas that DeepSpeed's documents publish: `cpu` per node, `gpu` per device, and
    `largest_layer`. The largest layer's l = 4L is added to every device figure.

    No offload: device l + 18P/G, host 4L g f with `zero_init`, else 4P g f. Optimizer offloaded: device l + 2P/G, host
    16P/nodes f, else P max(4g, 16/nodes) f. Parameters too: device l, host 18P/nodes f, else P max(4g, 18/nodes) f.

    Args:
        total_params: number of parameters (P), not bytes.
        largest_layer_params: parameters of the largest layer (L).
        num_gpus_per_node, num_nodes: g, and how many nodes.
        cpu_offload, cpu_offload_params: whether `offload_optimizer` and `offload_param` are "cpu".
        zero_init: whether the model is built under `Init`.
        additional_buffer_factor: f.
    """
    total_gpus = num_nodes * num_gpus_per_node
    share = 1 / num_nodes
    largest = 4 * largest_layer_params
    if not cpu_offload:
        gpu = largest + int(18 * total_params / total_gpus)
        counted = largest_layer_params if zero_init else total_params
        cpu = counted * 4 * num_gpus_per_node * additional_buffer_factor
        return MemoryNeeds(int(cpu), gpu, largest)
    held = 18 if cpu_offload_params else 16
    gpu = largest if cpu_offload_params else largest + int(2 * total_params / total_gpus)
    per_parameter = held * share if zero_init else max(4 * num_gpus_per_node, held * share)
    return MemoryNeeds(int(total_params * per_parameter * additional_buffer_factor), gpu, largest)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> str:
    """Print and return a table of all options of stage 2 for a model of `total_params` parameters, in bytes per node
    and per device. Arguments as in `estimate_zero2_model_states_mem_needs`.
    """
    rows = []
    for offload in (True, False):
        cpu, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((cpu, gpu, f"offload_optimizer={'cpu' if offload else 'none'}"))
    return _table(_title(total_params, None, num_gpus_per_node, num_nodes), rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> str:
    """The table of `estimate_zero2_model_states_mem_needs_all_cold` for a model at hand: its parameters are counted,
    nothing is moved or changed.
    """
    total = sum(p.numel() for p in model.parameters())
    return estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> str:
    """Print and return a table of all options of stage 3, in bytes per node and per device. Arguments as in
    `estimate_zero3_model_states_mem_needs`.
    """
    rows = []
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            needs = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            text = (
                f"offload_param={'cpu' if offload_params else 'none'}, "
                f"offload_optimizer={'cpu' if offload else 'none'}, zero_init={int(zero_init)}"
            )
            rows.append((needs.cpu, needs.gpu, text))
    return _table(_title(total_params, largest_layer_params, num_gpus_per_node, num_nodes), rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> str:
    """The table of `estimate_zero3_model_states_mem_needs_all_cold` for a model at hand; its largest layer is the
    module with the most parameters of its own.
    """
    total = sum(p.numel() for p in model.parameters())
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _title(total: int, largest: int | None, gpus: int, nodes: int) -> str:
    layer = "" if largest is None else f", {largest:,} in its largest layer"
    return f"model states of {total:,} parameters{layer} on {nodes} node(s) with {gpus} device(s) each:"


def _table(title: str, rows: Iterable[tuple[int, int, str]]) -> str:
    size: Callable[[int], str] = lambda count: f"{count / 2**30:8.2f} GiB"  # noqa: E731
    text = "\n".join(
        [title, "  per host     | per device   | options", *(f"  {size(c)} | {size(g)} | {o}" for c, g, o in rows)]
    )
    print(text)  # noqa: T201  what scripts call these functions for
    return text
