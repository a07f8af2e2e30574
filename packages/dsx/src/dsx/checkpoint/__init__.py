"""Checkpoints that know nothing of ranks: saved by any stage and world size, loaded by any other.

    from dsx.checkpoint import open_checkpoint
    reader = open_checkpoint("ckpt")               # the latest tag
    weight = reader.whole("lm_head.weight")        # hash checked

The engine calls `save` and `load`; `Reader` serves tools. The format is described in `format.py`.
"""

from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError
from .folder import resolve_tag
from .format import Index, Placed, Slice, TensorSpec
from .ranks import Ranks
from .reading import Loaded, Prepared, Reader, load, open_checkpoint, prepare_load
from .writing import save

__all__ = [
    "CheckpointArgumentError",
    "CheckpointCorruptError",
    "CheckpointError",
    "Index",
    "Loaded",
    "Placed",
    "Prepared",
    "Ranks",
    "Reader",
    "Slice",
    "TensorSpec",
    "load",
    "open_checkpoint",
    "prepare_load",
    "resolve_tag",
    "save",
]
