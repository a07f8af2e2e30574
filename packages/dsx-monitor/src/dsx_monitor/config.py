"""The configuration sections of dsx-monitor, as frozen models that refuse unknown keys.

Only code that reads a configuration imports this module: pydantic costs more than the rest of the package together.
Every section is off unless `enabled` is true. `MonitorConfig` is all of them in one; a configuration that has these
sections among others (such as that of `dsx`) is accepted wherever a `MonitorConfig` is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "CSVConfig",
    "CometConfig",
    "FlopsProfilerConfig",
    "JSONLConfig",
    "MonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
]

_JOB = "DeepSpeedJobName"


def _whole(value: Any) -> Any:
    """Let 1e2 through as 100, as JSON written by hand has it; the strict check judges the rest."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
_Depth = Annotated[int, BeforeValidator(_whole), Field(ge=-1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _FileSection(_Section):
    """A section whose files lie in `output_path/job_name/`."""

    enabled: bool = Field(default=False, description="switches the writer on")
    output_path: str | None = Field(
        default="", description="folder; null or empty: the current one; ~ is the home folder"
    )
    job_name: str = Field(default=_JOB, description="folder below output_path; may be empty")


class TensorBoardConfig(_FileSection):
    """Scalars as TensorBoard event files."""


class CSVConfig(_FileSection):
    """One CSV file per label."""


class JSONLConfig(_FileSection):
    """All events in one `events.jsonl`, one JSON object per line; what the HTML report reads."""


class WandbConfig(_Section):
    """Scalars to Weights & Biases."""

    enabled: bool = Field(default=False, description="switches the writer on")
    group: str | None = Field(default=None, description="group of the run")
    team: str | None = Field(default=None, description="team (entity) that owns the run")
    project: str = Field(default="deepspeed", description="project of the run")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        default=None, description="null: WANDB_MODE if set, else online"
    )


class CometConfig(_Section):
    """Scalars to Comet. What is null comes from COMET_* variables or the Comet configuration file."""

    enabled: bool = Field(default=False, description="switches the writer on")
    workspace: str | None = Field(default=None, description="workspace of the experiment")
    project: str | None = Field(default=None, description="project of the experiment")
    experiment_name: str | None = Field(default=None, description="name of the experiment")
    experiment_key: str | None = Field(default=None, description="key of an experiment to create or go on with")
    api_key: str | None = Field(default=None, description="API key; better kept in COMET_API_KEY")
    samples_log_interval: _Count = Field(
        default=100, description="least number of samples between two events of one label"
    )
    online: bool | None = Field(default=None, description="false: write an archive to upload later; null: online")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        default=None, description="what to do about experiment_key; null: get_or_create"
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

    enabled: bool = Field(default=False, description="switches the profiler on")
    profile_step: _Count = Field(default=1, description="which optimizer step is profiled, counted from 1")
    module_depth: _Depth = Field(default=-1, description="depth of the modules in the aggregate; -1: the deepest")
    top_modules: _Count = Field(default=1, description="how many modules the aggregate lists per depth")
    detailed: bool = Field(default=True, description="print the annotated module tree")
    output_file: str | None = Field(default=None, description="write there instead of the log")
    recompute_fwd_factor: float = Field(
        default=0.0, ge=0.0, description="share of the forward pass done again in backward"
    )
