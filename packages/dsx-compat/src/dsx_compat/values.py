"""Constants, enumerations and records that programs import from DeepSpeed, and small questions: no behaviour."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ._version import DEEPSPEED_VERSION

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_OPTIMIZERS",
    "VALID_LR_SCHEDULES",
    "OffloadDeviceEnum",
    "SubparamShape",
    "TorchBackend",
    "ZeroParamStatus",
    "ZeroParamType",
    "ZeroStageEnum",
    "is_model_parallel_parameter",
    "required_torch_version",
    "zero_wrapper_for_fp_tensor_constructor",
]

version, git_hash, git_branch = DEEPSPEED_VERSION, None, None
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

# runtime.lr_schedules: names of schedules, and of their arguments
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"
WARMUP_TYPE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "warmup_type", "log", "linear"
TOTAL_NUM_STEPS = "total_num_steps"

# launcher.runner
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]

# launcher.constants: what `--launcher` takes
PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER, IMPI_LAUNCHER = "pdsh", "openmpi", "mpich", "impi"
SLURM_LAUNCHER, MVAPICH_LAUNCHER = "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024
MVAPICH_TMP_HOSTFILE = os.path.join(tempfile.gettempdir(), "deepspeed_mvapich_hostfile")

# checkpoint.constants: names of files, and of entries in them, in DeepSpeed's folders (those of dsx are others)
OPTIMIZER_STATE_DICT, FP32_GROUPS, FP32_FLAT_GROUPS = "optimizer_state_dict", "fp32_groups", "fp32_flat_groups"
BASE_OPTIMIZER_STATE, GROUP_PADDINGS = "base_optimizer_state", "group_paddings"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
PARTITION_COUNT, ZERO_STAGE, CLIP_GRAD, LOSS_SCALER = "partition_count", "zero_stage", "clip_grad", "loss_scaler"
PARAM, PARAM_SHAPES, BUFFER_NAMES, DS_VERSION = "param", "param_shapes", "buffer_names", "ds_version"
FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
MODEL_FILE_PREFIX, LAYER_FILE_PREFIX, ZERO_FILE_PREFIX = "mp_rank_", "layer_", "zero_pp_rank_"
MODEL_FILE_SUFFIX, OPTIM_FILE_SUFFIX = "_model_states.pt", "_optim_states.pt"

# checkpoint.constants: what a universal checkpoint says of tensor slices
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"

# runtime.config: optimizers by the names that configurations use
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "adagrad"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
ONEBIT_ADAM_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "onebitadam", "zerooneadam", "onebitlamb"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    ONEBIT_ADAM_OPTIMIZER,
    ONEBIT_LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    ZERO_ONE_ADAM_OPTIMIZER,
]

# runtime.constants: routes of `deepspeed_io`
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"


class ZeroParamStatus(Enum):
    """`param.ds_status`: whether this rank's memory has the whole parameter. dsx does not use `INFLIGHT`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """`param.ds_param_type`: how a parameter is kept. All parameters that stage 3 manages are `PARTITIONED`."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroStageEnum(IntEnum):
    """Stages of ZeRO, as in `zero_optimization.stage`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Devices to which states may be offloaded, as in `offload_optimizer.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class SubparamShape:
    """The cut into slices of a tensor that holds several parameters side by side (fused query, key and value).

    A record only: programs put it into the metadata of DeepSpeed's universal checkpoints. Checkpoints of dsx need no
    such metadata, and the import of a DeepSpeed checkpoint that has it is refused.

    Attributes:
        patterns: regular expressions for the names of the parameters.
        shape: the whole shape; a tuple in place of a number gives the sizes of the parts along that dimension.
        partition_dim: the dimension that is cut.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


class TorchBackend:
    """A class for `isinstance` checks only: dsx uses torch.distributed's process groups, without a backend."""


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return `fn` itself: dsx's `zero.Init` replaces no constructor of torch, so there is nothing to wrap."""
    return fn


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Whether a parameter is one slice of a larger one: a mark of Megatron's or DeepSpeed's layers is set on it."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least `min_version` and at most `max_version`.

    Raises:
        ValueError: neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: got neither min_version nor max_version, expected at least one")
    found = TorchVersion(torch.__version__.partition("+")[0])  # "+cpu" is no newer version
    return not (
        (min_version is not None and found < str(min_version)) or (max_version is not None and found > str(max_version))
    )
