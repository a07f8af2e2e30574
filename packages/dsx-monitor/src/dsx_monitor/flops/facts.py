"""Facts about the run that a profile is part of, and the rows of its summary. This module does not import torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..processes import current_world_size
from .ranks import RankTotals
from .tree import Node
from .units import (
    count_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = ["RunFacts", "facts_of_engine", "summary_rows", "unknown_text"]

_MOST_NAMED = 12


@dataclass(frozen=True)
class RunFacts:
    """The setting of the profiled part.

    Attributes:
        world_size: processes of the job.
        data_parallel: how many ranks hold the same part of the model; None: not known (several processes, and no engine
            that knows), then the summary leaves it out.
        model_parallel: the number of parts of the model; None: not known.
        batch_size: samples of this process in the profiled part; None: not known.
        micro_batches: forwards that these samples were divided into.
        step_seconds: length of the optimizer step that followed; None: not measured.
        system: the system around the model, such as "ZeRO stage 3".
        over_ranks: all ranks' figures, if they were gathered.
    """

    world_size: int = 1
    data_parallel: int | None = 1
    model_parallel: int | None = 1
    batch_size: int | None = None
    micro_batches: int = 1
    step_seconds: float | None = None
    system: str = ""
    over_ranks: RankTotals | None = None


def facts_of_engine(engine: Any) -> RunFacts:
    """The facts that an engine gives through the usual attributes. Without an engine, only the number of processes."""
    if engine is None:
        world = current_world_size()
        return RunFacts() if world == 1 else RunFacts(world_size=world, data_parallel=None, model_parallel=None)

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
    """The summary as names and texts, in the order in which it is shown.

    Latencies and operations are those of the whole profiled part on this process: all `micro_batches` forwards.
    """
    rows = {"world size": str(facts.world_size)}
    if facts.data_parallel is not None:
        rows["data parallel size"] = str(facts.data_parallel)
    if facts.model_parallel is not None:
        rows["model parallel size"] = str(facts.model_parallel)
    if facts.system:
        rows["system"] = facts.system
    if facts.batch_size is not None:
        split = f" ({facts.micro_batches} micro-batches)" if facts.micro_batches > 1 else ""
        rows["batch size per GPU"] = f"{facts.batch_size}{split}"
    rows |= {
        "params per GPU": params_to_string(root.params),
        "fwd MACs per GPU": macs_to_string(root.macs),
        "fwd flops per GPU": count_to_string(root.flops),
    }
    rows |= _model_rows(root, facts) if facts.over_ranks is None else _rows_of_ranks(facts.over_ranks, facts)
    rows |= {
        "fwd latency": duration_to_string(root.seconds),
        "fwd FLOPS per GPU": _rate(root.flops, root.seconds),
    }
    rows |= _backward_rows(root, totals, facts)
    if totals.outside_flops:
        rows["flops outside the model"] = count_to_string(totals.outside_flops)
    if totals.unknown:
        rows["not counted"] = unknown_text(totals.unknown)
    return rows


def unknown_text(unknown: Counter[str]) -> str:
    """Operators that are not counted, the most frequent first, with how often they ran."""
    named = ", ".join(f"{name} x{times}" for name, times in unknown.most_common(_MOST_NAMED))
    return named if len(unknown) <= _MOST_NAMED else f"{named} and {len(unknown) - _MOST_NAMED} others"


def _model_rows(root: Node, facts: RunFacts) -> dict[str, str]:
    """Rows about the model: this process' part times the number of parts, if that is known."""
    parallel = facts.model_parallel
    if parallel is None:
        return {}
    return {
        "params of model = params per GPU * mp_size": params_to_string(root.params * parallel),
        "fwd flops of model = fwd flops per GPU * mp_size": count_to_string(root.flops * parallel),
    }


def _rows_of_ranks(totals: RankTotals, facts: RunFacts) -> dict[str, str]:
    """Rows about the whole step, from the figures of all ranks."""
    count = len(totals.ranks)
    params = "params of all ranks" if facts.data_parallel is None else "params of model, all ranks / dp_size"
    rows = {
        params: params_to_string(totals.params),
        f"fwd flops of {count} ranks": count_to_string(totals.flops),
    }
    if totals.backward_flops:
        rows[f"bwd flops of {count} ranks, measured"] = count_to_string(totals.backward_flops)
    busiest = max(range(count), key=lambda rank: totals.ranks[rank].flops)
    share = totals.ranks[busiest].flops * count / totals.flops if totals.flops else 1.0
    rows["most fwd flops of a rank / mean"] = f"{share:.2f} (rank {busiest})"
    return rows


def _backward_rows(root: Node, totals: Any, facts: RunFacts) -> dict[str, str]:
    if not totals.backward_flops:
        return {}
    rows = {
        "bwd flops per GPU, measured": count_to_string(totals.backward_flops),
        "bwd flops / fwd flops": f"{totals.backward_flops / root.flops:.2f}" if root.flops else "-",
    }
    if totals.recompute_flops:
        rows["of these, recomputation"] = count_to_string(totals.recompute_flops)
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
            rows["samples/second"] = number_to_string(facts.batch_size * (facts.data_parallel or 1) / whole).rstrip()
    return rows


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds) if seconds > 0 else "-"
