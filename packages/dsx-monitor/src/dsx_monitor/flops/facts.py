"""What a profile says about the run around it, and the rows of its summary. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .tree import Node
from .units import duration_to_string, flops_to_string, macs_to_string, number_to_string, params_to_string

__all__ = ["RunFacts", "summary_rows"]


@dataclass(frozen=True)
class RunFacts:
    """Where and on how much the profiled part ran.

    Attributes:
        world_size, data_parallel, model_parallel: sizes of the job.
        batch_size: samples this process worked on in the profiled part; None: not known.
        micro_batches: forwards they were divided into.
        step_seconds: length of the optimizer step that followed; None: not measured.
        system: what ran around the model, such as "ZeRO stage 3".
    """

    world_size: int = 1
    data_parallel: int = 1
    model_parallel: int = 1
    batch_size: int | None = None
    micro_batches: int = 1
    step_seconds: float | None = None
    system: str = ""


def facts_of_engine(engine: Any) -> RunFacts:
    """What an engine with the field's usual attributes tells; ones where there is none."""
    if engine is None:
        return RunFacts()

    def number(name: str) -> int | None:
        value = getattr(engine, name, None)
        value = value() if callable(value) else value
        return value if isinstance(value, int) else None

    return RunFacts(
        world_size=number("world_size") or 1,
        data_parallel=number("dp_world_size") or 1,
        model_parallel=number("mp_world_size") or 1,
        batch_size=number("train_micro_batch_size_per_gpu"),
    )


def summary_rows(root: Node, totals: Any, facts: RunFacts) -> dict[str, str]:
    """The summary as name and text, in the order in which it is shown.

    Latencies and operations are those of the whole profiled part on this process, `micro_batches` forwards together.
    """
    rows = {
        "world size": str(facts.world_size),
        "data parallel size": str(facts.data_parallel),
        "model parallel size": str(facts.model_parallel),
    }
    if facts.system:
        rows["system"] = facts.system
    if facts.batch_size is not None:
        split = f" ({facts.micro_batches} micro-batches)" if facts.micro_batches > 1 else ""
        rows["batch size per GPU"] = f"{facts.batch_size}{split}"
    parallel = facts.model_parallel
    rows |= {
        "params per GPU": params_to_string(root.params),
        "params of model = params per GPU * mp_size": params_to_string(root.params * parallel),
        "fwd MACs per GPU": macs_to_string(root.macs),
        "fwd flops per GPU": flops_to_string(root.flops),
        "fwd flops of model = fwd flops per GPU * mp_size": flops_to_string(root.flops * parallel),
        "fwd latency": duration_to_string(root.seconds),
        "fwd FLOPS per GPU": _rate(root.flops, root.seconds),
    }
    rows |= _backward_rows(root, totals, facts)
    if totals.outside_flops:
        rows["flops outside the model"] = flops_to_string(totals.outside_flops)
    if totals.unknown:
        rows["not counted"] = ", ".join(f"{name} x{times}" for name, times in totals.unknown.most_common(12))
    return rows


def _backward_rows(root: Node, totals: Any, facts: RunFacts) -> dict[str, str]:
    if not totals.backward_flops:
        return {}
    rows = {
        "bwd flops per GPU, measured": flops_to_string(totals.backward_flops),
        "bwd flops / fwd flops": f"{totals.backward_flops / root.flops:.2f}" if root.flops else "-",
    }
    if totals.recompute_flops:
        rows["of these, recomputation"] = flops_to_string(totals.recompute_flops)
    both = root.seconds + totals.backward_seconds
    rows |= {
        "bwd latency": duration_to_string(totals.backward_seconds),
        "bwd FLOPS per GPU": _rate(totals.backward_flops, totals.backward_seconds),
        "fwd+bwd FLOPS per GPU": _rate(root.flops + totals.backward_flops, both),
    }
    if facts.step_seconds is not None:
        whole = both + facts.step_seconds
        rows["step latency"] = duration_to_string(facts.step_seconds)
        rows["iter latency"] = duration_to_string(whole)
        if facts.batch_size is not None and whole > 0:
            rows["samples/second"] = number_to_string(facts.batch_size * facts.data_parallel / whole).rstrip()
    return rows


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds) if seconds > 0 else "-"
