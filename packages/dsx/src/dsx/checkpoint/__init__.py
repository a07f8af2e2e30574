"""Checkpoints that know nothing of ranks: saved by any stage and world size, loaded by any other.

    from dsx.checkpoint import open_checkpoint
    reader = open_checkpoint("ckpt")               # the latest tag
    weight = reader.whole("lm_head.weight")        # hash checked

The engine calls `save` and `prepare_load`; `Reader` serves tools. The format is described in
`docs/checkpoint-format.md`.

Modules, from data to doing:

    boxes.py, crc.py                            which part of a tensor, and hashes of parts
    format.py, parsing.py, checks.py            the index as data, and from text to data; version1.py: of version 1
    encode.py                                   Python state as data
    files.py, folder.py, ranks.py               bytes; tags, locks and leftovers; agreement between ranks
    snapshot.py, plan.py, writing.py            a save
    verifying.py, reading.py                    a load
    command.py                                  `dsx checkpoint`

Names are loaded on first use: what reads an index alone does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from .boxes import Box, Region
    from .folder import resolve_tag
    from .format import Index, Placed, TensorSpec
    from .ranks import Ranks
    from .reading import Loaded, Prepared, Reader, load, open_checkpoint, prepare_load
    from .snapshot import Place
    from .writing import save

_MODULES = {
    "Box": "boxes",
    "Index": "format",
    "Loaded": "reading",
    "Place": "snapshot",
    "Placed": "format",
    "Prepared": "reading",
    "Ranks": "ranks",
    "Reader": "reading",
    "Region": "boxes",
    "TensorSpec": "format",
    "load": "reading",
    "open_checkpoint": "reading",
    "prepare_load": "reading",
    "resolve_tag": "folder",
    "save": "writing",
}

__all__ = [
    "Box",
    "CheckpointArgumentError",
    "CheckpointCorruptError",
    "CheckpointError",
    "Index",
    "Loaded",
    "Place",
    "Placed",
    "Prepared",
    "Ranks",
    "Reader",
    "Region",
    "TensorSpec",
    "load",
    "open_checkpoint",
    "prepare_load",
    "resolve_tag",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
