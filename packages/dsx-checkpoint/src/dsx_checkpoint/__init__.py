"""Checkpoints that do not depend on ranks: saved at any stage and world size, and loaded at any other.

    from dsx_checkpoint import open_checkpoint
    reader = open_checkpoint("ckpt")               # the latest tag
    weight = reader.whole("lm_head.weight")        # hash checked

The engine calls `save` and `prepare_load`; `Reader` serves tools. The format is described in
`docs/checkpoint-format.md`.

Modules, in the order from data to actions:

    boxes.py, crc.py                            which part of a tensor, and hashes of parts
    format.py, parsing.py, checks.py            the index as data, and from text to data; version1.py: of version 1
    encode.py                                   Python state as data
    files.py, folder.py, ranks.py               bytes; tags, locks and leftovers; agreement between ranks
    direct.py, regions.py                       bytes past the page cache; tensors to and from files
    snapshot.py, announcing.py                  what a rank holds, and what it tells of it
    plan.py, striping.py, writers.py            files and the tensors in them; who writes what
    planning.py, shares.py, agreeing.py         the plan on rank 0, and each rank's part of it
    writing.py, indexing.py                     a save
    linking.py, keeping.py, behind.py           files that have not changed; old checkpoints; saves behind training
    failures.py                                 errors of saves behind training, and the exit code of the process
    verifying.py, selecting.py, reading.py      regions by name, verified
    loading.py                                  a load
    spans.py, node_part.py                      which bytes of a checkpoint one node has
    nodes/                                      where each node has a disk of its own
    whole.py                                    weights as a mapping
    extra_state.py                              what modules keep beside parameters and buffers
    training.py                                 plain modules and optimizers, DDP, FSDP2
    looking.py, exporting.py, command.py        `dsx checkpoint`
    foreign/                                    checkpoints of other programs

Names are imported on first use, so that programs that only read an index do not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__
from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from .boxes import Box, Region
    from .exporting import export
    from .folder import resolve_tag
    from .foreign.recognising import read_foreign
    from .foreign.source import write_source
    from .format import Index, Placed, TensorSpec
    from .keeping import Keeping
    from .loading import Loaded, Prepared, load, prepare_load
    from .ranks import Ranks
    from .reading import Reader, open_checkpoint
    from .selecting import Selection
    from .snapshot import Place
    from .training import load_training, save_training
    from .writing import save

_MODULES = {
    "Box": "boxes",
    "Index": "format",
    "Keeping": "keeping",
    "Loaded": "loading",
    "Place": "snapshot",
    "Placed": "format",
    "Prepared": "loading",
    "Ranks": "ranks",
    "Reader": "reading",
    "Region": "boxes",
    "Selection": "selecting",
    "TensorSpec": "format",
    "export": "exporting",
    "load": "loading",
    "load_training": "training",
    "save_training": "training",
    "open_checkpoint": "reading",
    "prepare_load": "loading",
    "read_foreign": "foreign.recognising",
    "resolve_tag": "folder",
    "save": "writing",
    "write_source": "foreign.source",
}

__all__ = [
    "Box",
    "CheckpointArgumentError",
    "CheckpointCorruptError",
    "CheckpointError",
    "Index",
    "Keeping",
    "Loaded",
    "Place",
    "Placed",
    "Prepared",
    "Ranks",
    "Reader",
    "Region",
    "Selection",
    "TensorSpec",
    "export",
    "load",
    "load_training",
    "save_training",
    "open_checkpoint",
    "prepare_load",
    "read_foreign",
    "resolve_tag",
    "save",
    "write_source",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
