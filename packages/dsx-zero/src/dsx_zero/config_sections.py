"""The sections inside `zero_optimization` that are objects of their own, and the types of values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["Auto", "Count", "LeafModules", "LoCo", "OffloadOptimizer", "OffloadParam", "Section", "Size"]


def _whole(value: Any) -> Any:
    """Let 5e8 through as 500000000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Size = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Auto = Literal["auto"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class OffloadParam(Section):
    """The place of parameters between uses (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = Field(
        "cpu", description="none: device memory; cpu: host memory; nvme: files on disk"
    )
    nvme_path: str | None = Field("/local_nvme", description="folder for parameters on disk")
    pin_memory: bool = Field(False, description="use page-locked host memory")
    buffer_count: Count = Field(5, description="most shards that are read ahead from disk")
    buffer_size: Count = Field(
        100_000_000, description="elements per shard read ahead: together at most buffer_count x buffer_size elements"
    )
    max_in_cpu: Size = Field(
        1_000_000_000, description="device nvme: elements that are kept in host memory instead of on disk"
    )


class OffloadOptimizer(Section):
    """The place of fp32 master weights and optimizer states, and of their update."""

    device: Literal["none", "cpu", "nvme"] = Field(
        "cpu", description="none: device memory; cpu: host memory; nvme: files on disk"
    )
    nvme_path: str | None = Field("/local_nvme", description="folder for states on disk")
    pin_memory: bool = Field(False, description="use page-locked host memory")
    buffer_count: Annotated[int, Field(ge=4)] = Field(
        4,
        description=(
            "device nvme: host buffers between memory and disk; for every 4 of them one more sub-group is read ahead"
        ),
    )
    fast_init: bool = Field(
        False, description="device nvme: write the states to disk when the model is sharded, not in the first step"
    )
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] = Field(1.0, description="fraction of the states that is offloaded")
    step_during_backward: bool = Field(
        True,
        description=(
            "step each unit on the host as soon as its gradients are there; with clipping or a check for overflow the"
            " step is undone if the norm says so, and on a CPU only if the file says true"
        ),
    )
    max_in_cpu: Size = Field(
        1_000_000_000,
        description=(
            "elements of new parameters that may wait in host memory for the end of the step, where units are stepped"
            " during backward and their states are on disk, or fp32 parameters are in host memory; units beyond it are"
            " stepped after backward. If it is set, also the most elements whose old values are copied for a step that"
            " may be undone. If it is set with device nvme, also the most elements whose states a step has in"
            " host memory at a time (sub-groups become smaller, down to 1048576 elements)"
        ),
    )
    late_update_after: Size | None = Field(
        None,
        description=(
            "after this many steps each update is applied one step late: the host computes it beside the next forward"
            " and backward; null: never"
        ),
    )
    pipeline_read: bool = Field(
        False,
        description=(
            "device nvme: read the next states while the present ones are updated; dsx does so unless the"
            " file says false"
        ),
    )
    pipeline_write: bool = Field(
        False,
        description=(
            "device nvme: write the last states while the present ones are updated; dsx does so unless"
            " the file says false"
        ),
    )
    super_offload: bool = Field(False, description="offload tuned for superchips")
    cpuadam_cores_perc: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="super_offload: fraction of the cores that the host step uses"
    )


class LoCo(Section):
    """Error feedback of quantised gradients."""

    err_beta: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.8, description="share of the old error in the moving average; the new error has the rest"
    )
    reset_T: Count = Field(1024, description="steps after which the averaged error is set to zero")


class LeafModules(Section):
    """Modules that are fetched and freed as a whole."""

    classes: tuple[str, ...] | list[str] = Field((), description="names of classes; their modules are leaf modules")
    names: tuple[str, ...] | list[str] = Field((), description="full module names")
    name_suffixes: tuple[str, ...] | list[str] = Field((), description="suffixes of module names")
