"""Constants and enumerations that programs import from DeepSpeed, and questions about versions: no behaviour."""

from __future__ import annotations

from collections.abc import Callable
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
    "TorchBackend",
    "ZeroParamStatus",
    "ZeroParamType",
    "ZeroStageEnum",
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

# checkpoint.constants: names of files, and of entries in them, in DeepSpeed's folders (those of dsx are others)
OPTIMIZER_STATE_DICT, FP32_GROUPS, FP32_FLAT_GROUPS = "optimizer_state_dict", "fp32_groups", "fp32_flat_groups"
BASE_OPTIMIZER_STATE, GROUP_PADDINGS = "base_optimizer_state", "group_paddings"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
PARTITION_COUNT, ZERO_STAGE, CLIP_GRAD, LOSS_SCALER = "partition_count", "zero_stage", "clip_grad", "loss_scaler"
PARAM, PARAM_SHAPES, BUFFER_NAMES, DS_VERSION = "param", "param_shapes", "buffer_names", "ds_version"
FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
MODEL_FILE_PREFIX, LAYER_FILE_PREFIX, ZERO_FILE_PREFIX = "mp_rank_", "layer_", "zero_pp_rank_"
MODEL_FILE_SUFFIX, OPTIM_FILE_SUFFIX = "_model_states.pt", "_optim_states.pt"

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


class TorchBackend:
    """A class for `isinstance` checks only: dsx uses torch.distributed's process groups, without a backend."""


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return `fn` itself: dsx's `zero.Init` replaces no constructor of torch, so there is nothing to wrap."""
    return fn


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
