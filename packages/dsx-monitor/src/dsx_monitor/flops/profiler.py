"""`FlopsProfiler`: start, run a step, stop, read.

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(batch).sum(); loss.backward()
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.write_html("profile.html")
    profiler.end_profile()

Totals are those of the forward pass, as existing scripts expect. `get_total_backward_flops` counts the backward pass,
recomputed forward operations included. `print_*` write to standard output; `text` returns the same text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from .counter import Totals, Watch
from .facts import RunFacts, facts_of_engine, summary_rows
from .page import profile_page
from .ranks import RankFigures, RankTotals
from .text import aggregate_text, profile_text
from .tree import Node
from .units import duration_to_string, flops_to_string, macs_to_string, params_to_string

__all__ = ["FlopsProfiler", "ProfilerError"]


class ProfilerError(RuntimeError):
    """The profiler was asked for a figure that it has not measured."""


class FlopsProfiler:
    """Counts operations and time of everything that `model` runs between start and stop.

    Args:
        model: the module whose calls make the tree; may be sharded or wrapped.
        ds_engine: an engine around it, for the batch size and the world size in the summary.
        recompute_fwd_factor: accepted for existing scripts; recomputation is counted as it runs.

    Attributes:
        facts: facts about the run for the summary; may be replaced before printing.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine = model, ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.facts: RunFacts = facts_of_engine(ds_engine)
        self.started = False
        self._watch: Watch | None = None
        self._ignored: tuple[type[nn.Module], ...] = ()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting. Calls of the classes in `ignore_list` are left out, with everything they call.
        Raises `ProfilerError` where this profiler is running already.
        """
        if self.started:
            raise ProfilerError("start_profile: this profiler is running already; call stop_profile first")
        self._ignored = tuple(ignore_list or ())
        self._watch = Watch(self.model, self._ignored)
        self._watch.start()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting. The figures stay until `reset_profile`, `end_profile` or the next start."""
        if self.started and self._watch is not None:
            self._watch.stop()
        self.started = False

    def reset_profile(self) -> None:
        """Forget all figures. If the profiler is running, it goes on from zero."""
        running = self.started
        self.stop_profile()
        self._watch = None
        if running:
            self.start_profile(self._ignored)

    def end_profile(self) -> None:
        """Stop and forget all figures."""
        self.stop_profile()
        self._watch = None

    # - Figures

    @property
    def root(self) -> Node:
        """The tree of calls."""
        return self._measured().root

    @property
    def totals(self) -> Totals:
        """Totals, and counts that have no place in the tree."""
        return self._measured().totals

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations of the model's forward pass."""
        return flops_to_string(self.root.flops) if as_string else self.root.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates of the model's forward pass."""
        return macs_to_string(self.root.macs) if as_string else self.root.macs

    def get_total_backward_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations of everything that autograd ran, recomputation included."""
        value = self.totals.backward_flops
        return flops_to_string(value) if as_string else value

    def get_total_recompute_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations of the forwards that ran again during backward."""
        value = self.totals.recompute_flops
        return flops_to_string(value) if as_string else value

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds in the model's forward pass."""
        return duration_to_string(self.root.seconds) if as_string else self.root.seconds

    def get_total_backward_duration(self, as_string: bool = False) -> float | str:
        """Seconds in backward."""
        value = self.totals.backward_seconds
        return duration_to_string(value) if as_string else value

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Number of parameters of the model. Shared ones count once, and sharded ones in full."""
        return params_to_string(self.root.params) if as_string else self.root.params

    def get_unknown_operators(self) -> dict[str, int]:
        """Operators that ran but are not counted, with the number of their calls."""
        return dict(self.totals.unknown)

    def gather_ranks(self, gather: Callable[[list[float]], Sequence[Sequence[float]]]) -> RankTotals:
        """Gather the figures of all ranks and sum them: in a pipeline each rank sees only its own stage. Collective.

        From then on the summary shows them. The number of parameters is the sum over all ranks, divided by
        `facts.data_parallel` if that is known.

        Args:
            gather: takes this rank's list of numbers, and returns the lists of all ranks in the order of the ranks.
        """
        totals, root = self.totals, self.root
        own = RankFigures(
            root.flops,
            root.macs,
            totals.backward_flops,
            totals.recompute_flops,
            root.params,
            root.seconds,
            totals.backward_seconds,
        )
        ranks = tuple(map(RankFigures.of_row, gather(own.row())))
        found = RankTotals(ranks, self.facts.data_parallel or 1)
        self.facts = replace(self.facts, over_ranks=found)
        return found

    # - Output

    def text(self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
        """Summary, aggregate and (if `detailed`) the module tree."""
        summary = profile_text(self._rows(), profile_step)
        return summary + aggregate_text(self.root, module_depth, top_modules, detailed)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print `text`, or write it to `output_file`; a name ending in .json or .html gets that form instead."""
        if output_file is None:
            sys.stdout.write(self.text(profile_step, module_depth, top_modules, detailed))
        elif output_file.endswith(".json"):
            self.write_json(output_file, profile_step)
        elif output_file.endswith((".html", ".htm")):
            self.write_html(output_file, profile_step)
        else:
            _write(output_file, self.text(profile_step, module_depth, top_modules, detailed))

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the modules with the most parameters, operations and time, per depth."""
        sys.stdout.write(aggregate_text(self.root, module_depth, top_modules, detailed=False))

    def as_dict(self, profile_step: int = 1) -> dict[str, Any]:
        """Everything measured, as JSON values: `step`, `summary` (texts), `facts`, `totals`, `modules` (a tree).

        Each module has `name`, `class`, `params`, `calls`, forward `flops`, `macs` and `seconds`, `backward_flops`,
        `backward_macs`, `backward_seconds` and `recompute_flops`, which include its children; `own_*` are without
        them; `children` has the children.
        """
        totals = {**asdict(self.totals), "unknown": dict(self.totals.unknown)}
        return {
            "step": profile_step,
            "model": self.root.kind,
            "summary": self._rows(),
            "facts": asdict(self.facts),
            "totals": totals,
            "modules": _as_dict(self.root),
        }

    def write_json(self, path: str | Path, profile_step: int = 1) -> Path:
        """Write `as_dict` to a JSON file; returns its path."""
        return _write(path, json.dumps(self.as_dict(profile_step), indent=1))

    def write_html(self, path: str | Path, profile_step: int = 1) -> Path:
        """Write one page with a tree of modules that can be folded, sorted and searched; returns its path."""
        return _write(path, profile_page(self.as_dict(profile_step)))

    def _rows(self) -> dict[str, str]:
        return summary_rows(self.root, self.totals, self.facts)

    def _measured(self) -> Watch:
        if self._watch is None:
            raise ProfilerError("nothing was profiled; call start_profile, run the model, then stop_profile")
        return self._watch


def _as_dict(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "class": node.kind,
        "params": node.params,
        "calls": node.calls,
        "flops": node.flops,
        "macs": node.macs,
        "seconds": node.seconds,
        "backward_flops": node.backward_flops,
        "backward_macs": node.backward_macs,
        "backward_seconds": node.backward_seconds,
        "recompute_flops": node.recompute_flops,
        "own_flops": node.own_flops,
        "own_seconds": node.own_seconds,
        "own_backward_flops": node.own_backward_flops,
        "own_backward_seconds": node.own_backward_seconds,
        "children": [_as_dict(child) for child in node.children.values()],
    }


def _write(path: str | Path, text: str) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target
