"""Checkpoints that know nothing of ranks: saved by any stage and world size, loaded by any other.

    from dsx.checkpoint import open_checkpoint
    reader = open_checkpoint("ckpt")               # the latest tag
    weight = reader.whole("lm_head.weight")        # hash checked

The engine calls `save` and `load`; `Reader` serves tools. The format is described in `format.py`.
"""

from .errors import CheckpointCorruptError, CheckpointError
from .format import Index, Placed, Slice, TensorSpec
from .load import Loaded, Reader, load, open_checkpoint, resolve_tag
from .save import save

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "Index",
    "Loaded",
    "Placed",
    "Reader",
    "Slice",
    "TensorSpec",
    "load",
    "open_checkpoint",
    "resolve_tag",
    "save",
]
