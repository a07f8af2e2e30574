"""The `autotuning` section: the search of `dsx launch --autotuning`, and the measurements of an engine for it.

The tuner, not the user, writes two of the keys. With `metric_path` an engine measures the updates from
`start_profile_step` to `end_profile_step`, writes the result to that file and ends the program. With `model_info_path`
and `model_info.profile` it also writes facts about the model. Without these keys, training is not affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from dsx_core import Finding
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["Autotuning", "ModelInfo"]


def _whole(value: Any) -> Any:
    """Turn 5e1 into 50; the strict check judges all other values."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Size = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class ModelInfo(_Section):
    """Known facts about the model, and whether an engine writes down what it finds."""

    profile: bool = Field(False, description="write facts about the model to model_info_path, then end the program")
    num_params: Size | None = Field(None, description="number of parameters")
    hidden_size: Size | None = Field(None, description="hidden size")
    num_layers: Size | None = Field(None, description="number of layers")


class Autotuning(_Section):
    """Search for the fastest ZeRO stage, micro-batch size and other settings: `dsx launch --autotuning tune|run`."""

    NO_EFFECT: ClassVar[dict[str, str]] = {
        f"model_info.{name}": "the first experiment looks at the model itself"
        for name in ("num_params", "hidden_size", "num_layers")
    }
    """Keys that are accepted because published files have them, and why they have no effect."""
    BETTER: ClassVar[dict[str, str]] = {
        "": "what cannot fit is planned, not tried; latency is minimised; a search that was killed continues"
    }

    enabled: bool = Field(False, description="switches the section on")
    results_dir: str | None = Field(
        "autotuning_results", description="folder of the results and the journal; null: autotuning_results"
    )
    exps_dir: str | None = Field(
        "autotuning_exps", description="folder with one folder per experiment; null: autotuning_exps"
    )
    overwrite: bool = Field(False, description="run experiments again although their results exist")
    metric: Literal["throughput", "latency", "FLOPS", "flops"] = Field(
        "throughput",
        description=(
            "what is optimised: most samples per second, fewest seconds per update (latency), or most"
            " floating-point operations per second and device"
        ),
    )
    start_profile_step: Count = Field(3, description="first update that is measured, counted from 1")
    end_profile_step: Count = Field(5, description="last update that is measured")
    fast: bool = Field(
        True,
        description=(
            "do not try other bucket sizes and overlap_comm; lists in the configuration are tried in any case"
        ),
    )
    max_train_batch_size: Count | None = Field(None, description="largest global batch")
    min_train_batch_size: Count = Field(1, description="smallest global batch")
    max_train_micro_batch_size_per_gpu: Count = Field(1024, description="largest micro-batch")
    min_train_micro_batch_size_per_gpu: Count = Field(1, description="smallest micro-batch")
    mp_size: Count = Field(1, description="ranks that share one copy of the model; they get the same samples")
    num_tuning_micro_batch_sizes: Count = Field(
        3, description="how many micro-batch sizes are tried with the same other settings: the largest ones that fit"
    )
    tuner_type: Literal["model_based", "gridsearch", "random"] = Field(
        "model_based",
        description=(
            "order of the experiments: model_based: by predictions and measurements; gridsearch: in"
            " order; random: at random"
        ),
    )
    tuner_early_stopping: Size = Field(
        5, description="the search stops after this many experiments without progress; 0: never"
    )
    tuner_num_trials: Count = Field(50, description="largest number of experiments per ZeRO stage")
    arg_mappings: dict[str, str] | None = Field(
        None,
        description=("maps a configuration key to the command-line option of the script that must have the same value"),
    )
    num_nodes: Count | None = Field(
        None, description="number of hosts to tune on, the first ones; null: all hosts of the command"
    )
    num_gpus: Count | None = Field(
        None, description="number of devices per host to tune on; null: all devices of the command"
    )
    model_info: ModelInfo | None = Field(None, description="known facts about the model")
    model_info_path: str | None = Field(None, description="file to which facts about the model are written")
    metric_path: str | None = Field(None, description="file to which the metric is written")
    max_memory_per_gpu: Count | None = Field(
        None,
        description=(
            "bytes that a rank may use in an experiment, on its device or, without one, on the host; null: 0.95 of the"
            " device's memory, or this rank's share of 0.9 of the host's free memory"
        ),
    )
    trial_timeout: Seconds | None = Field(
        None,
        description=(
            "seconds after which an experiment is ended; null: derived from the first experiment's time, at least 120"
        ),
    )

    @property
    def measures(self) -> bool:
        """Whether an engine with this section measures and ends the program."""
        return self.enabled and (self.metric_path is not None or self.profiles)

    @property
    def profiles(self) -> bool:
        """Whether an engine with this section writes facts about the model."""
        wanted = self.model_info is not None and self.model_info.profile
        return self.enabled and wanted and self.model_info_path is not None

    @property
    def counts_operations(self) -> bool:
        """Whether the metric is operations per second."""
        return self.metric in ("FLOPS", "flops")

    def findings(self) -> Iterator[Finding]:
        """The contradictions inside the section, by key; none if it is off."""
        if not self.enabled:
            return
        pairs = (
            ("start_profile_step", "end_profile_step"),
            ("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"),
            ("min_train_batch_size", "max_train_batch_size"),
        )
        for low, high in pairs:
            first, last = getattr(self, low), getattr(self, high)
            if last is not None and last < first:
                yield Finding(
                    high, f"it is below autotuning.{low}", str(last), f"at least {first}",
                    f"raise it, or lower autotuning.{low}", "conflict",
                )  # fmt: skip
        if self.counts_operations and self.start_profile_step == 1:
            yield Finding(
                "start_profile_step", "operations are counted in the first update, which is slow", "1",
                "at least 2 with this metric", "set it to 2 or more", "conflict",
            )  # fmt: skip
        if self.model_info is not None and self.model_info.profile and self.model_info_path is None:
            yield Finding(
                "model_info.profile", "the facts have no file to go to", "true", "autotuning.model_info_path",
                "set the path, or remove profile: the tuner looks at the model by itself", "missing",
            )  # fmt: skip
