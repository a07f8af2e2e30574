"""Names of the files in DeepSpeed's folders, by rank, and how the states of two ranks are joined.

Checkpoints of dsx have other files (`dsx_checkpoint`). These functions serve programs that read DeepSpeed's own.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from ..values import MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX, OPTIM_FILE_SUFFIX, ZERO_FILE_PREFIX

__all__ = [
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "merge_state",
]


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The file of a model-parallel rank's model states; the rank is text of two digits, such as "00"."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The file of a rank's optimizer states."""
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return os.path.join(base_folder, name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The file of one layer of a tensor-parallel rank, as DeepSpeed's tools name it; `layer_id` is such as "layer_03".

    `PipelineModule.ckpt_layer_path` gives the files that pipelines write.
    """
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """The states of two ranks as one.

    Tensors are joined along dimension 0; those without dimensions, and all values that are neither tensors nor
    containers, are `state_a`'s. Dictionaries are merged key by key, lists and tuples element by element.

    Args:
        key_list: the keys that led here, for the error.

    Raises:
        ValueError: two values are of different types, or two lists of different lengths.
    """
    place = ".".join(key_list) or "the state itself"
    if type(state_a) is not type(state_b):
        raise ValueError(
            f"merge_state: {place}: got a {type(state_a).__name__} and a {type(state_b).__name__}, expected one type"
        )
    if type(state_a) in (dict, OrderedDict):
        merged = type(state_a)(state_a)
        for key, value in state_b.items():
            merged[key] = merge_state(state_a[key], value, [*key_list, str(key)]) if key in state_a else value
        return merged
    if type(state_a) in (list, tuple):
        if len(state_a) != len(state_b):
            raise ValueError(
                f"merge_state: {place}: got {len(state_a)} and {len(state_b)} elements, expected as many in both"
            )
        return type(state_a)(merge_state(a, b, key_list) for a, b in zip(state_a, state_b, strict=True))
    if isinstance(state_a, torch.Tensor) and state_a.dim() > 0:
        return torch.cat([state_a, state_b], 0)
    return state_a
