"""One checkpoint from the folders of several nodes, without a job: `dsx checkpoint join`. Needs no torch."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from dsx_core import replace_text

from ..errors import CheckpointCorruptError, CheckpointError
from ..files import PIECE_BYTES, create, opened, read_text, write_all
from ..folder import publish, remove_replaced, temporary_name
from ..format import INDEX_NAME, Index
from ..parsing import parse_index
from ..saving_lock import saving
from ..spans import Spans
from ..verifying import verify_all
from .finding import Found, check_complete, look_into, saves_of

__all__ = ["join"]

Progress = Callable[[int, int], None]


def join(
    folders: Sequence[Path], target: Path, tag: str | None = None, progress: Progress = lambda done, total: None
) -> Path:
    """Put the newest checkpoint together of which all bytes lie in `folders`, and verify it; returns its folder.

    Args:
        folders: what `save_checkpoint` was given on each node.
        target: the folder that gets the checkpoint, under the same tag.
        tag: which one; None: the newest.
        progress: called with the bytes that are copied, and all there are.

    Raises:
        CheckpointError: there is none of which all bytes are there, or it cannot be written.
    """
    found = {number: look_into(folder) for number, folder in enumerate(folders)}
    tags = sorted({one.tag for items in found.values() for one in items})
    wanted = {number: [one for one in items if tag in (None, one.tag)] for number, items in found.items()}
    problem: CheckpointError = CheckpointError(
        f"{', '.join(map(str, folders))}: have no checkpoint {'' if tag is None else repr(tag)}; tags there: "
        f"{', '.join(tags) or 'none'}"
    )
    for held in saves_of(wanted):
        try:
            index, text = _index_of(held, folders)
            check_complete(held, index, folders[next(iter(held))] / next(iter(held.values())).tag)
        except CheckpointCorruptError as error:
            problem = error
            continue
        return _write(held, folders, index, text, target, progress)
    raise problem


def _index_of(held: dict[int, Found], folders: Sequence[Path]) -> tuple[Index, str]:
    number, one = next(iter(held.items()))
    path = folders[number] / one.name / INDEX_NAME
    text = read_text(path)
    return parse_index(text, str(path)), text


def _write(
    held: dict[int, Found], folders: Sequence[Path], index: Index, text: str, target: Path, progress: Progress
) -> Path:
    tag = next(iter(held.values())).tag
    if (target / tag).exists():
        raise CheckpointError(f"{target / tag}: exists already; choose another folder")
    with saving(target, tag):
        temporary = target / temporary_name(tag, uuid.uuid4().hex[:12])
        temporary.mkdir()
        try:
            for name, file in index.files.items():
                create(temporary / name, b"", file.nbytes)
            _copy(held, folders, index, temporary, progress)
            replace_text(temporary / INDEX_NAME, text)
            verify_all(temporary, index)
            remove_replaced(publish(temporary, target / tag, latest=index.latest))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target / tag


def _copy(held: dict[int, Found], folders: Sequence[Path], index: Index, temporary: Path, progress: Progress) -> None:
    done, total, there = 0, sum(file.nbytes for file in index.files.values()), Spans()
    for number, one in held.items():
        take, there = one.part.spans - there, there | one.part.spans
        for name, begin, end in take.pieces(PIECE_BYTES):
            with opened(folders[number] / one.name / name, os.O_RDONLY) as fd:
                data = os.pread(fd, end - begin, begin)
            if len(data) != end - begin:
                raise CheckpointCorruptError(f"{folders[number] / one.name / name}: was cut short")
            with opened(temporary / name, os.O_WRONLY) as fd:
                write_all(fd, memoryview(data), begin)
            done += len(data)
            progress(done, total)
    for name in index.files:
        with opened(temporary / name, os.O_WRONLY) as fd:
            os.fsync(fd)
