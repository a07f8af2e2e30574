"""Checkpoints without an engine: `dsx_checkpoint` under the name that scripts use.

The names of this module are the same objects as in the package, which are imported on first use.
"""

from __future__ import annotations

from typing import Any

import dsx_checkpoint
from dsx_checkpoint import __all__ as __all__

from .deepspeed_names import PLACES, finder


def __getattr__(name: str) -> Any:
    return finder(__name__)(name) if name in PLACES[__name__] else getattr(dsx_checkpoint, name)
