"""Removes keys that other programs write into configurations and that dsx does not need, with one warning.

dsx refuses unknown keys, because a mistyped one would have no effect. Some programs write keys that DeepSpeed never
read, and their users cannot change that. Only known keys of such programs are removed:

* names with dots, `"zero_optimization.reduce_bucket_size": 8e7` (trl writes them for its forward-only engines);
* `offload_optimizer` and `offload_param` at stage 0, where nothing is divided (trl sets stage 0 and keeps them).

Accelerate writes `"steps_per_print": inf`, which means never. It is replaced by None.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

from .errors import CompatWarning

__all__ = ["client_config"]


def client_config(config: Any) -> Any:
    """The configuration without the keys that have no effect. Anything but a mapping is returned unchanged.

    Warns:
        CompatWarning: names the keys that were removed.
    """
    if not isinstance(config, Mapping) or isinstance(config, (str, os.PathLike)):
        return config
    cleaned = dict(config)
    dropped = [str(key) for key in cleaned if isinstance(key, str) and "." in key]
    for key in dropped:
        del cleaned[key]
    zero = cleaned.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage", 0) == 0:
        unused = [key for key in ("offload_optimizer", "offload_param") if zero.get(key)]
        if unused:
            cleaned["zero_optimization"] = {key: value for key, value in zero.items() if key not in unused}
            dropped += [f"zero_optimization.{key} (nothing is divided at stage 0)" for key in unused]
    if cleaned.get("steps_per_print") == math.inf:
        cleaned["steps_per_print"] = None
    if dropped:
        warnings.warn(
            f"deepspeed.initialize: these keys of the configuration have no effect and are left out:"
            f" {', '.join(dropped)} [DSX159] docs: errors#dsx159",
            CompatWarning,
            stacklevel=4,
        )
    return cleaned
