"""The folder that holds checkpoints: tags, `latest`, what killed saves leave behind, and who saves in it.

    <folder>/<tag>/                       a committed checkpoint; a tag is a plain name
    <folder>/latest                       text: the tag that is loaded when none is asked for
    <folder>/.tmp-<tag>-<12 hex digits>/  a checkpoint that is being written
    <folder>/.old-<tag>-<12 hex digits>/  a checkpoint of the same tag that is being replaced
    <folder>/.saving                      locked by the job that saves; its text says who that is

The lock makes it certain that `.tmp-` and `.old-` folders belong to nobody any more, so that the next save, of whatever
tag, can clear them away; and it names a second job that saves in the same folder at the same time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..utils.logging import logger
from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError, shown
from .files import read_text, replace_text, sync_folder
from .format import INDEX_NAME, LATEST_NAME
from .parsing import parse_index

_LOCK_NAME = ".saving"
_BEING_WRITTEN, _BEING_REPLACED = ".tmp-", ".old-"
_LEFTOVER = re.compile(r"(?P<mark>\.tmp-|\.old-)(?P<tag>.+)-[0-9a-f]{12}", re.DOTALL)
_LEFT_FILES = re.compile(rf"\.{LATEST_NAME}\.[0-9]+|\.probe-[0-9a-f]+")
_SHOWN_TAGS = 20


# - Names


def check_folder(folder: object, argument: str) -> Path:
    """The folder that a caller gave. Raises `CheckpointArgumentError` for None, "" and what is no path."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise CheckpointArgumentError(
            f"{argument}: got {shown(folder)}, expected the path of a folder, such as 'checkpoints'"
        )
    return Path(os.fspath(folder))


def check_one_folder(call: str, paths: Sequence[str]) -> None:
    """Raise `CheckpointArgumentError` unless all ranks named one folder; `paths`: each rank's, without links."""
    if len(set(paths)) > 1:
        first = {path: rank for rank, path in reversed(list(enumerate(paths)))}
        named = "; ".join(f"rank {rank}: {path}" for path, rank in sorted(first.items(), key=lambda item: item[1])[:10])
        raise CheckpointArgumentError(
            f"{call}: ranks name different folders ({named}); pass the same folder on every rank, as an absolute path "
            "if they run in different working directories"
        )


def check_tag(tag: object) -> str:
    """The name of a checkpoint. Raises `CheckpointArgumentError` unless it is a plain folder name."""
    name = str(tag)
    if not name or name != os.path.basename(name) or name.startswith(".") or "\0" in name:
        raise CheckpointArgumentError(f"got tag {shown(name)}; expected a plain folder name such as 'global_step100'")
    return name


def temporary_name(tag: str, unique: str) -> str:
    """Name of the folder in which a checkpoint is written; `unique` has 12 hex digits."""
    return f"{_BEING_WRITTEN}{tag}-{unique}"


def tags_in(root: Path) -> list[str]:
    """Tags of the committed checkpoints in a folder, sorted."""
    return sorted(path.parent.name for path in root.glob(f"*/{INDEX_NAME}") if not path.parent.name.startswith("."))


# - Finding a checkpoint


def resolve_tag(root: Path, tag: str | None) -> str | None:
    """`tag`, or what `latest` says; None when there is no checkpoint at all.

    Where `latest` is missing (a save was killed just before it wrote it), the newest checkpoint that it was to name.

    Raises:
        CheckpointArgumentError: the tag is no plain folder name.
        CheckpointError: the folder is a file, or one tag's folder, or has only checkpoints that were saved with
            `save_latest=False`, or another program's.
        CheckpointCorruptError: `latest` is damaged.
    """
    if tag is not None:
        return check_tag(tag)
    if not root.is_dir():
        if root.exists():
            raise CheckpointError(f"{root}: is a file, expected the folder that save_checkpoint was given")
        return None
    latest = root / LATEST_NAME
    if os.path.lexists(latest):
        return _tag_of_latest(latest)
    if (root / INDEX_NAME).is_file():
        raise CheckpointError(f"{root} is one tag's folder; pass load_dir={root.parent} and tag={root.name!r}")
    refuse_foreign(root)
    tags = tags_in(root)
    newest = newest_meant_as_latest(root)
    if newest is not None:
        logger.warning("%s: has no file '%s'; taking the newest checkpoint there, %s", root, LATEST_NAME, newest)
        return newest
    if tags:
        raise CheckpointError(
            f"{root}: has no file '{LATEST_NAME}', but these checkpoints: {_list(tags)}; pass the tag of one of them, "
            f"or write its name into '{LATEST_NAME}'"
        )
    return None


def newest_meant_as_latest(root: Path) -> str | None:
    """The youngest checkpoint that `latest` was to name: its save was killed before, or the file was lost since."""
    return next(meant_as_latest(root), None)


def meant_as_latest(root: Path) -> Iterator[str]:
    """The tags of all checkpoints that `latest` was to name, the youngest first. Those that cannot be read are passed
    over with a warning.
    """
    paths = [root / tag / INDEX_NAME for tag in tags_in(root)]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            index = parse_index(read_text(path), str(path))
        except (CheckpointError, OSError) as error:
            logger.warning("%s: passed over: %s", path.parent, error)
            continue
        if index.latest:
            yield path.parent.name


def _tag_of_latest(latest: Path) -> str:
    try:
        text = read_text(latest).strip()
    except OSError as error:
        raise CheckpointError(
            f"{latest}: cannot be read ({error}); pass a tag: {_list(tags_in(latest.parent))}"
        ) from error
    try:
        return check_tag(text)
    except CheckpointArgumentError as error:
        raise CheckpointCorruptError(
            f"{latest}: {error}; checkpoints there: {_list(tags_in(latest.parent))}"
        ) from error


def find_checkpoint(root: Path, tag: str) -> Path:
    """The folder of a committed checkpoint. Raises `CheckpointError` that says what there is instead."""
    folder = root / check_tag(tag)
    if not folder.exists():  # a save that replaced this tag was killed between its two renames
        folder = next((old for old in _replaced(root, tag) if (old / INDEX_NAME).is_file()), folder)
    if not (folder / INDEX_NAME).is_file():
        refuse_foreign(folder)
        raise CheckpointError(f"{folder}: no checkpoint there; tags in {root}: {_list(tags_in(root))}")
    return folder


def _list(tags: list[str]) -> str:
    more = f" and {len(tags) - _SHOWN_TAGS} more" if len(tags) > _SHOWN_TAGS else ""
    return (", ".join(tags[-_SHOWN_TAGS:]) or "none") + more


_DEEPSPEED = re.compile(
    r"(layer_\d+(_expert_\d+|-model_\d+)?_?.*|(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_?.*|expp_rank_\d+_?.*)"
    r"(model|optim)_states\.pt|zero_to_fp32\.py|latest_universal"
)


def refuse_foreign(folder: Path) -> None:
    """Raise `CheckpointError` where a folder holds a checkpoint of DeepSpeed."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = next((name for name in names if _DEEPSPEED.fullmatch(name)), None)
    if found is not None:
        raise CheckpointError(
            f"{folder}: this is a checkpoint of DeepSpeed ({found}), not one of dsx. Its files are pickles, which a "
            "load never reads. Write one of dsx from it, optimizer states included: dsx checkpoint import FOLDER NEW"
        )


# - Saving in it


@contextmanager
def saving(root: Path, tag: str) -> Iterator[None]:
    """This process saves in `root`: no other may at the same time, and what killed saves left is cleared away first.

    Raises:
        CheckpointError: another process, which it names, is saving there.
    """
    root.mkdir(parents=True, exist_ok=True)
    fd = _lock(root / _LOCK_NAME, tag)
    try:
        clear_leftovers(root, None if fd is not None else tag)
        yield
    finally:
        if fd is not None:
            (root / _LOCK_NAME).unlink(missing_ok=True)  # before the lock is given up: see `_lock`
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would leave it with children that were forked meanwhile
            os.close(fd)


def _lock(path: Path, tag: str) -> int | None:
    """A descriptor that holds the lock; None on a file system that has no locks."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held the lock before has removed the file: what is locked here may be a file without a name.
            if path.exists() and os.path.samestat(os.fstat(fd), os.stat(path)):
                _sign(fd, f"process {os.getpid()} on {socket.gethostname()}, tag {tag}")
                return fd
            os.close(fd)
        except BlockingIOError:
            owner = os.pread(fd, 500, 0).decode(errors="replace").strip()
            os.close(fd)
            raise CheckpointError(
                f"{path.parent}: another job is saving here right now ({owner or 'it has not said who it is yet'}); "
                "give each job a folder of its own, or they replace each other's 'latest'"
            ) from None
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
                raise
            logger.debug("%s: this file system has no locks (%s)", path, error)
            return None


def _sign(fd: int, text: str) -> None:
    """Say in the lock's file who holds it. On a full disk the lock holds without."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        logger.debug("the lock of a checkpoint folder has no text: %s", error)


def clear_leftovers(root: Path, only_tag: str | None = None) -> None:
    """Remove what killed saves left; a checkpoint whose only copy lies under its `.old-` name gets its own name back.

    Args:
        only_tag: leave other tags' alone, because it is not certain that nobody is writing them.
    """
    for path in sorted(root.iterdir()):
        found = _LEFTOVER.fullmatch(path.name)
        if found is not None and only_tag in (None, found["tag"]):
            if (
                found["mark"] == _BEING_REPLACED
                and not (root / found["tag"]).exists()
                and (path / INDEX_NAME).is_file()
            ):
                os.rename(path, root / found["tag"])
            else:
                _remove(path)
        elif only_tag is None and _LEFT_FILES.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("save_checkpoint: %s was left by a killed save and cannot be removed: %s", path, error)


def unfinished(root: Path) -> list[tuple[str, Path]]:
    """Tag and folder of what killed saves left: being written, or being replaced."""
    matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in root.iterdir()) if root.is_dir() else ()
    return sorted((found["tag"], path) for path, found in matches if found is not None)


def _replaced(root: Path, tag: str) -> list[Path]:
    matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(p for p, m in matches if m is not None and m["mark"] == _BEING_REPLACED and m["tag"] == tag)


def publish(temporary: Path, target: Path, *, latest: bool) -> Path | None:
    """Give a finished checkpoint its name: from here on it exists. Then let `latest` name it, if so wished.

    Returns:
        Where the checkpoint is that had this name before, for `remove_replaced`; None if there was none.
    """
    sync_folder(temporary)
    replaced = None
    if target.exists():
        # Two renames are not one step: killed between them, the tag is found under its `.old-` name
        # (`find_checkpoint`).
        replaced = target.with_name(f"{_BEING_REPLACED}{target.name}-{uuid.uuid4().hex[:12]}")
        os.rename(target, replaced)
    os.rename(temporary, target)
    sync_folder(target.parent)
    if latest:
        replace_text(target.parent / LATEST_NAME, target.name)
    return replaced


def remove_replaced(folder: Path | None) -> None:
    """Remove the checkpoint that a new one of its name has replaced."""
    if folder is not None:
        _remove(folder)


def foreign_files(folder: Path, own: set[str]) -> tuple[str, ...]:
    """Names in a checkpoint's folder that dsx did not write, such as config.json or a tokenizer."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in own))
