"""`FlopsProfiler`: start, run a step, stop, read.

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(batch).sum(); loss.backward()
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.end_profile()

Totals are those of the forward pass, as scripts of the field expect; `get_total_backward_flops` has what backward did,
recomputed forward operations included.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .counter import Watch
from .text import aggregate_text, profile_text
from .tree import Node
from .units import duration_to_string, flops_to_string, macs_to_string, params_to_string

__all__ = ["FlopsProfiler", "ProfilerError"]

logger = logging.getLogger("dsx_monitor")


class ProfilerError(RuntimeError):
    """The profiler was asked for something it has not measured."""


class FlopsProfiler:
    """Counts operations and time of everything that `model` runs between start and stop.

    Args:
        model: the module whose calls make the tree.
        ds_engine: an engine around it, for the batch size and the world size in the summary.
        recompute_fwd_factor: accepted for scripts; recomputation is counted as it runs.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine = model, ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._watch: Watch | None = None
        self._ignored: tuple[type[nn.Module], ...] = ()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin; calls of the classes in `ignore_list` are left out with all they call."""
        if self.started:
            raise ProfilerError("start_profile: this profiler is running already; call stop_profile first")
        self._ignored = tuple(ignore_list or ())
        self._watch = Watch(self.model, self._ignored)
        self._watch.start()
        self.started = True

    def stop_profile(self) -> None:
        """End; the figures stay until `reset_profile`, `end_profile` or the next start."""
        if self.started and self._watch is not None:
            self._watch.stop()
        self.started = False

    def reset_profile(self) -> None:
        """Forget all figures; if running, go on from zero."""
        running = self.started
        self.stop_profile()
        self._watch = None
        if running:
            self.start_profile(self._ignored)

    def end_profile(self) -> None:
        """Stop and forget all figures."""
        self.stop_profile()
        self._watch = None

    @property
    def root(self) -> Node:
        """The tree of calls."""
        return self._measured().root

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Of the model's forward pass."""
        return flops_to_string(self.root.flops) if as_string else self.root.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Of the model's forward pass."""
        return macs_to_string(self.root.macs) if as_string else self.root.macs

    def get_total_backward_flops(self, as_string: bool = False) -> int | str:
        """Of everything autograd ran, recomputation included."""
        value = self._measured().totals.backward_flops
        return flops_to_string(value) if as_string else value

    def get_total_recompute_flops(self, as_string: bool = False) -> int | str:
        """Of the modules that ran again during backward."""
        value = self._measured().totals.recompute_flops
        return flops_to_string(value) if as_string else value

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds in the model's forward pass."""
        return duration_to_string(self.root.seconds) if as_string else self.root.seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters of the model, shared ones once; whole ones, however they are sharded."""
        return params_to_string(self.root.params) if as_string else self.root.params

    def get_unknown_operators(self) -> dict[str, int]:
        """Operators that ran and are not counted, with how often."""
        return dict(self._measured().totals.unknown)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Log the summary, the aggregate and (if `detailed`) the module tree, or write them to `output_file`."""
        watch = self._measured()
        text = profile_text(watch.root, watch.totals, profile_step, self._summary())
        text += aggregate_text(watch.root, module_depth, top_modules, detailed)
        if output_file is None:
            logger.info("%s", text)
        else:
            path = Path(output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Log the modules with the most parameters, operations and time, per depth."""
        logger.info("%s", aggregate_text(self.root, module_depth, top_modules, detailed=False))

    def _summary(self) -> dict[str, str]:
        engine = self.ds_engine
        if engine is None:
            return {}
        return {
            "world size": str(engine.world_size),
            "data-parallel size": str(engine.dp_world_size),
            "model-parallel size": str(engine.mp_world_size),
            "batch size per GPU": str(engine.train_micro_batch_size_per_gpu()),
        }

    def _measured(self) -> Watch:
        if self._watch is None:
            raise ProfilerError("nothing was profiled; call start_profile, run the model, then stop_profile")
        return self._watch
