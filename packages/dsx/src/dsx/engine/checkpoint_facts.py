"""Facts about a run that its checkpoints contain: configuration, versions, layout. People and tools read them; a load
does not need them.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from dsx_monitor.secrets import without_secrets

from .._version import __version__

__all__ = ["checkpoint_facts"]


def checkpoint_facts(config: Any, world_size: int) -> dict[str, dict[str, Any]]:
    """`config` (the values that were set; secrets of services are masked), `versions` and `layout`."""
    zero = config.zero
    placement = {
        name: "none" if section is None else section.device
        for name, section in (("parameters", zero.offload_param), ("optimizer", zero.offload_optimizer))
    }
    return {
        "config": without_secrets(config.to_dict()),
        "versions": {"dsx": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "layout": {"ranks": world_size, "zero_stage": zero.stage, "placement": placement},
    }
