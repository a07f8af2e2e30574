"""The part of an engine's configuration that `Init` reads, and arguments of DeepSpeed's `Init` that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ZeroConfigError

__all__ = ["check_later", "dtype_of", "offload_of", "read_config"]

_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_COMMA = re.compile(r'("(?:[^"\\\n]|\\.)*")|,(?=\s*[}\]])')


def check_later(**later: Any) -> None:
    known = {
        "zero_param_parallel_group",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "sequence_data_parallel_group",
        "param_swapper",
        "tensor_overrides",
    }
    for name, value in later.items():
        if name not in known:
            raise TypeError(f"Init got an unexpected argument {name!r}")
        if value not in (None, False) and name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
            raise ZeroConfigError(
                f"Init.{name}",
                f"Init only divides parameters; set zero_optimization.{name} in the configuration of the sharded model",
            )
        if value not in (None, False):
            raise ZeroConfigError(f"Init.{name}", "not available yet: leave it out")


def read_config(path: str | Path) -> Any:
    """Read a JSON file. Comments and trailing commas are allowed, as in the configuration of an engine.

    Raises:
        ZeroConfigError: the file cannot be read, or is not JSON.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        for left_out in (_COMMENT, _COMMA):
            text = left_out.sub(lambda found: found[1] or "", text)
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ZeroConfigError(
            "Init.config",
            f"got {str(path)!r:.200}, which cannot be read ({error}); expected a dictionary or the path of a JSON file",
        ) from error


def dtype_of(config: Mapping[str, Any] | None) -> torch.dtype | None:
    for section, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if isinstance(config, Mapping) and dict(config.get(section) or {}).get("enabled") is True:
            return dtype
    return None


def offload_of(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The section ``zero_optimization.offload_param``; empty if there is none."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    found = zero.get("offload_param") if isinstance(zero, Mapping) else None
    return {"device": "cpu", **found} if isinstance(found, Mapping) else {}
