"""The configuration sections of dsx-monitor, as frozen models that refuse unknown keys.

Only code that reads a configuration imports this module, because importing pydantic takes longer than the rest of the
package together. Every section is off unless `enabled` is true. `MonitorConfig` has all sections; any configuration
with these sections among others (such as that of `dsx`) is accepted in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from dsx_core import Finding
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .events import checked_job_name

__all__ = [
    "CSVConfig",
    "CometConfig",
    "EigenvalueConfig",
    "FlopsProfilerConfig",
    "GradientNoiseConfig",
    "JSONLConfig",
    "MonitorConfig",
    "StragglerConfig",
    "TensorBoardConfig",
    "TimelineConfig",
    "WandbConfig",
]

_JOB = "DeepSpeedJobName"


def _whole(value: Any) -> Any:
    """Turn 1e2, as people write it in JSON, into 100; the strict check judges all other values."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
_Number = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
_Depth = Annotated[int, BeforeValidator(_whole), Field(ge=-1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


_WRITER = {"": "a writer that fails warns and does not end training"}
"""Comparison of each of DeepSpeed's sections of a writer with its effect there; "" is the section itself."""


class _FileSection(_Section):
    """A section whose files lie in `output_path/job_name/`."""

    enabled: bool = Field(default=False, description="switches the writer on")
    output_path: str | None = Field(
        default="", description="folder; null or empty: the current folder; ~ is the home folder"
    )
    job_name: Annotated[str, AfterValidator(checked_job_name)] = Field(
        default=_JOB, description="folder below output_path; may be empty"
    )


class TensorBoardConfig(_FileSection):
    """Scalars as TensorBoard event files."""

    BETTER: ClassVar[dict[str, str]] = _WRITER


class CSVConfig(_FileSection):
    """One CSV file per label."""

    BETTER: ClassVar[dict[str, str]] = _WRITER


class JSONLConfig(_FileSection):
    """All events in one `events.jsonl`, one JSON object per line; what the HTML report reads."""


class WandbConfig(_Section):
    """Scalars to Weights & Biases."""

    BETTER: ClassVar[dict[str, str]] = _WRITER

    enabled: bool = Field(default=False, description="switches the writer on")
    group: str | None = Field(default=None, description="group of the run")
    team: str | None = Field(default=None, description="team (entity) that owns the run")
    project: str = Field(default="deepspeed", description="project of the run")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        default=None, description="mode of Weights & Biases; null: WANDB_MODE if it is set, else online"
    )


class CometConfig(_Section):
    """Scalars to Comet. What is null comes from COMET_* variables or the Comet configuration file."""

    BETTER: ClassVar[dict[str, str]] = _WRITER

    enabled: bool = Field(default=False, description="switches the writer on")
    workspace: str | None = Field(default=None, description="workspace of the experiment")
    project: str | None = Field(default=None, description="project of the experiment")
    experiment_name: str | None = Field(default=None, description="name of the experiment")
    experiment_key: str | None = Field(default=None, description="key of an experiment to create or to continue")
    api_key: str | None = Field(default=None, description="API key; better kept in COMET_API_KEY")
    samples_log_interval: _Count = Field(
        default=100, description="fewest samples between two events with the same label"
    )
    online: bool | None = Field(default=None, description="false: write an archive to upload later; null: online")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        default=None, description="continue experiment_key (get), create it, or either; null: get_or_create"
    )


class MonitorConfig(_Section):
    """All writers. `enabled` is true if any of them is."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()
    csv_monitor: CSVConfig = CSVConfig()
    jsonl: JSONLConfig = JSONLConfig()

    @property
    def enabled(self) -> bool:
        """Whether any writer is switched on."""
        return any(getattr(self, name).enabled for name in type(self).model_fields)


class FlopsProfilerConfig(_Section):
    """Count and time the floating-point operations of one step."""

    BETTER: ClassVar[dict[str, str]] = {"": "profiles of micro-batches, as text, JSON and a page"}
    NO_EFFECT: ClassVar[dict[str, str]] = {"recompute_fwd_factor": "recomputation is counted as it runs"}

    enabled: bool = Field(default=False, description="switches the profiler on")
    profile_step: _Number = Field(
        default=1,
        description="the step that is profiled, counted from 0; 1 is the second step, after the warm-up",
    )
    module_depth: _Depth = Field(default=-1, description="depth of the modules in the summary; -1: the deepest modules")
    top_modules: _Count = Field(default=1, description="how many modules the summary lists per depth")
    detailed: bool = Field(default=True, description="print the module tree with the figures of each module")
    output_file: str | None = Field(
        default=None, description="write the report to this file instead of the log, and also as .json and .html"
    )
    recompute_fwd_factor: float = Field(
        default=0.0,
        ge=0.0,
        description="DeepSpeed: estimate of the recomputation; dsx counts recomputation when it runs",
    )


class TimelineConfig(_Section):
    """A Chrome/Perfetto trace of some steps on every rank: computing, gathering, reducing, waiting."""

    enabled: bool = Field(default=False, description="switches the trace on")
    output_path: str | None = Field(
        default="", description="folder; null or empty: that of jsonl if it is on, else the current folder"
    )
    start_step: _Number = Field(default=2, description="number of steps before the trace begins")
    steps: _Count = Field(default=5, description="number of steps in the trace")


class StragglerConfig(_Section):
    """Name the rank that holds the others up, by comparing the ranks' own work now and then."""

    enabled: bool | None = Field(
        default=None, description="compare the ranks; null: if wall_clock_breakdown is on and there are several ranks"
    )
    every: _Count = Field(default=50, description="steps between two comparisons")
    ratio: float = Field(
        default=1.3,
        gt=1.0,
        description="report a rank whose phase takes at least this many times as long as on the other ranks",
    )
    share: float = Field(
        default=0.1, ge=0.0, le=1.0, description="report it only if the difference is at least this fraction of a step"
    )


class GradientNoiseConfig(_Section):
    """The gradient noise scale: the batch size from which on larger batches help little."""

    enabled: bool = Field(default=False, description="switches the estimate on")
    memory: _Count = Field(default=100, description="number of steps over which the two estimates are averaged")


class EigenvalueConfig(_Section):
    """Largest curvature of each block, by power iteration."""

    enabled: bool = Field(default=False, description="switches the section on")
    verbose: bool = Field(default=False, description="log every iteration")
    max_iter: _Count = Field(default=100, description="largest number of iterations")
    tol: float = Field(
        default=0.01,
        ge=0.0,
        allow_inf_nan=False,
        description="the iteration ends when the eigenvalue's relative change is below this",
    )
    stability: float = Field(default=1e-6, ge=0.0, allow_inf_nan=False, description="added to norms before dividing")
    gas_boundary_resolution: _Count = Field(default=1, description="optimizer steps between two computations")
    layer_name: str = Field(default="bert.encoder.layer", description="path of the list of blocks in the model")
    layer_num: _Number = Field(default=0, description="number of blocks")

    def findings(self) -> Iterator[Finding]:
        """A number of blocks that is missing although the section is on."""
        if self.enabled and self.layer_num < 1:
            yield Finding(
                "layer_num", "the number of blocks is missing", "0", "how many children of layer_name are blocks",
                "set it, and layer_name to the path of the list of blocks",
            )  # fmt: skip
