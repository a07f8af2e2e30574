"""Recognises which program wrote a folder or a file, and reads it."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from ..errors import CheckpointCorruptError, CheckpointError, words_of
from ..folder import check_folder
from ..reading import open_checkpoint
from .deepspeed import deepspeed_folder, read_deepspeed
from .plain import read_plain
from .source import Source, of_reader
from .torch_dcp import METADATA, read_dcp

__all__ = ["IMPORTERS", "Importer", "read_foreign", "source_of"]


IMPORTERS = "dsx_checkpoint.importers"
"""Group of entry points: functions without arguments (or classes) that make an `Importer`. They are asked first."""


class Importer(Protocol):
    """Reads the checkpoints of one program."""

    def recognises(self, path: Path) -> bool:
        """Whether this program wrote the file or folder. It is looked at only, and may be anything."""
        ...

    def read(self, path: Path, tag: str | None) -> Source:
        """The contents of the checkpoint, as names and functions that read single tensors.

        Args:
            tag: which of several checkpoints in a folder; None: the only one, or the latest.

        Raises:
            CheckpointError: it cannot be read.
        """
        ...


def source_of(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> Source:
    """A checkpoint of dsx or of DeepSpeed; `tag`: as for `read_foreign`.

    Raises:
        CheckpointError: there is neither.
    """
    root = check_folder(checkpoint_dir, "checkpoint_dir")
    found = deepspeed_folder(root, tag)
    return of_reader(open_checkpoint(root, tag)) if found is None else read_deepspeed(found)


def read_foreign(path: str | os.PathLike[str], tag: str | None = None) -> Source:
    """A checkpoint of another program: DeepSpeed's, torch.distributed.checkpoint's (FSDP), a file with a state dict, a
    folder with safetensors, or what an installed `Importer` recognises.

    Args:
        tag: the tag of a DeepSpeed checkpoint; None: the one that `latest` names.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    given = check_folder(path, "path")
    try:
        return _read(given, tag)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{given}: cannot be read ({error})") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # what was read without being run may be anything, and no list of checks would name it all
        raise CheckpointCorruptError(
            f"{given}: is damaged, or no program that is known has written it ({words_of(error)})"
        ) from error


def _read(given: Path, tag: str | None) -> Source:
    for one in entry_points(group=IMPORTERS):
        importer: Importer = one.load()()
        if importer.recognises(given):
            return importer.read(given, tag)
    found = deepspeed_folder(given, tag)
    if found is not None:
        return read_deepspeed(found)
    if tag is not None:
        raise CheckpointError(f"{given}: has no tag {tag!r} of DeepSpeed")
    if (given / METADATA).is_file():
        return read_dcp(given)
    if given.is_file() or (given.is_dir() and _weights_in(given)):
        return read_plain(given)
    raise CheckpointError(
        f"{given}: got no checkpoint that can be imported; expected a folder of DeepSpeed or"
        " torch.distributed.checkpoint, a file with a state dict (.safetensors, .bin, .pt, .pth), or a folder with"
        " safetensors"
    )


def _weights_in(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
