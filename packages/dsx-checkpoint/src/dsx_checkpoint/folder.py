"""The folder of checkpoints: tags, `latest`, and leftovers of killed saves.

<folder>/<tag>/                       a committed checkpoint; a tag is a plain name
<folder>/latest                       text: the tag that is loaded if none is given
<folder>/.tmp-<tag>-<12 hex digits>/  a checkpoint that is being written
<folder>/.old-<tag>-<12 hex digits>/  a checkpoint of the same tag that is being replaced
<folder>/.saving                      locked by the job that saves (`saving_lock.py`)
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsx_core import replace_text, sync_folder, with_code

from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError, nothing_committed, shown
from .files import read_text
from .format import INDEX_NAME, LATEST_NAME, NODE_NAME, WEIGHT_MAP_NAME
from .parsing import parse_index

logger = logging.getLogger("dsx.checkpoint")

_BEING_WRITTEN, _BEING_REPLACED = ".tmp-", ".old-"
_LEFTOVER = re.compile(r"(?P<mark>\.tmp-|\.old-)(?P<tag>.+)-[0-9a-f]{12}", re.DOTALL)
_OWN = re.compile(
    rf"(model|optimizer|client)(-\d{{5}}-of-\d{{5}})?\.safetensors|\.?({re.escape(INDEX_NAME)}|{re.escape(NODE_NAME)})"
    rf"(\.[0-9]+)?|{re.escape(WEIGHT_MAP_NAME)}"
)
_LEFT_FILES = re.compile(rf"\.{LATEST_NAME}\.[0-9]+|\.probe-[0-9a-f]+")
_MAX_LISTED_TAGS = 20
_LONGEST_TAG = 255 - len(".tmp--0123456789ab")  # bytes; file systems take 255


# - Names


def check_folder(folder: object, argument: str) -> Path:
    """The folder that a caller gave, as a path. Raises `CheckpointArgumentError` for None, "" and other objects."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise CheckpointArgumentError(
            f"{argument}: got {shown(folder)}, expected the path of a folder, such as 'checkpoints'"
        )
    return Path(os.fspath(folder))


def check_one_folder(call: str, paths: Sequence[str]) -> None:
    """Raise `CheckpointArgumentError` unless all ranks named the same folder; `paths`: each rank's, with links
    resolved.
    """
    if len(set(paths)) > 1:
        first = {path: rank for rank, path in reversed(list(enumerate(paths)))}
        named = "; ".join(f"rank {rank}: {path}" for path, rank in sorted(first.items(), key=lambda item: item[1])[:10])
        raise CheckpointArgumentError(
            f"{call}: ranks name different folders ({named}); pass the same folder on every rank, as an absolute path "
            "if they run in different working directories",
            code="DSX505",
        )


def check_tag(tag: object) -> str:
    """The name of a checkpoint. Raises `CheckpointArgumentError` unless it is a plain folder name."""
    name = str(tag)
    if not name or name != os.path.basename(name) or name.startswith(".") or "\0" in name:
        raise CheckpointArgumentError(f"got tag {shown(name)}; expected a plain folder name such as 'global_step100'")
    if name in (LATEST_NAME, INDEX_NAME) or name != name.strip() or not name.isprintable():
        raise CheckpointArgumentError(
            f"got tag {shown(name)}; expected a plain folder name of printable characters, with no space at its ends,"
            f" that is not '{LATEST_NAME}' or '{INDEX_NAME}', which dsx needs itself"
        )
    if len(name.encode()) > _LONGEST_TAG:
        raise CheckpointArgumentError(
            f"got tag {shown(name)}; expected a plain folder name of at most {_LONGEST_TAG} bytes"
        )
    return name


def temporary_name(tag: str, unique: str) -> str:
    """Name of the folder in which a checkpoint is written; `unique` has 12 hex digits."""
    return f"{_BEING_WRITTEN}{tag}-{unique}"


def tags_in(root: Path) -> list[str]:
    """Tags of the committed checkpoints in a folder, sorted."""
    return sorted(path.parent.name for path in root.glob(f"*/{INDEX_NAME}") if not path.parent.name.startswith("."))


# - Finding a checkpoint


def resolve_tag(root: Path, tag: str | None) -> str | None:
    """`tag`, or the tag in `latest`; None if there is no checkpoint at all.

    If `latest` is missing (a save was killed just before it wrote the file), the newest checkpoint that was saved with
    `save_latest=True`.

    Raises:
        CheckpointArgumentError: the tag is not a plain folder name.
        CheckpointError: the folder is a file, or the folder of one tag, or has only checkpoints that were saved with
            `save_latest=False` or by another program.
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
        text = with_code("%s: has no file '%s'; taking the newest checkpoint there, %s", "DSX557")
        logger.warning(text, root, LATEST_NAME, newest)
        return newest
    if tags:
        raise CheckpointError(
            f"{root}: has no file '{LATEST_NAME}', but these checkpoints: {_list(tags)}; pass the tag of one of them, "
            f"or write its name into '{LATEST_NAME}'"
        )
    return None


def newest_meant_as_latest(root: Path) -> str | None:
    """The youngest checkpoint that was saved with `save_latest=True`, if the file `latest` is missing."""
    return next(meant_as_latest(root), None)


def meant_as_latest(root: Path) -> Iterator[str]:
    """The tags of all checkpoints that were saved with `save_latest=True`, the youngest first. Those that cannot be
    read are skipped with a warning.
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
    """The folder of a committed checkpoint. Raises `CheckpointError` with the tags that exist."""
    folder = root / check_tag(tag)
    if not folder.exists():  # a save that replaced this tag was killed between its two renames
        folder = next((old for old in _replaced(root, tag) if (old / INDEX_NAME).is_file()), folder)
    if not (folder / INDEX_NAME).is_file():
        refuse_foreign(folder)
        raise nothing_committed(f"{folder}: no checkpoint there; tags in {root}: {_list(tags_in(root))}")
    return folder


def _list(tags: list[str]) -> str:
    more = f" and {len(tags) - _MAX_LISTED_TAGS} more" if len(tags) > _MAX_LISTED_TAGS else ""
    return (", ".join(tags[-_MAX_LISTED_TAGS:]) or "none") + more


_DEEPSPEED = re.compile(
    r"(layer_\d+(_expert_\d+|-model_\d+)?_?.*|(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_?.*|expp_rank_\d+_?.*)"
    r"(model|optim)_states\.pt|zero_to_fp32\.py|latest_universal"
)


def refuse_foreign(folder: Path) -> None:
    """Raise `CheckpointError` if a folder has a checkpoint of DeepSpeed."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = next((name for name in names if _DEEPSPEED.fullmatch(name)), None)
    if found is not None:
        raise CheckpointError(
            f"{folder}: this is a checkpoint of DeepSpeed ({found}), not one of dsx. Its files are pickles, which a "
            "load never reads. Write one of dsx from it, optimizer states included: dsx checkpoint import FOLDER NEW",
            code="DSX504",
        )


# - Saving


def check_target(target: Path, *, latest: bool) -> None:
    """Raise `CheckpointError` if a save to `target` would replace what is no checkpoint of dsx.

    Args:
        latest: the save will write `latest`.
    """
    ours = (target / INDEX_NAME).is_file() or (target / NODE_NAME).is_file()
    if os.path.lexists(target) and not ours and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"{target}: exists and is no checkpoint of dsx (it has no {INDEX_NAME}), so a save does not replace it;"
            " choose another tag, or move what is there"
        )
    if latest and (target.parent / LATEST_NAME).is_dir():
        raise CheckpointError(
            f"{target.parent / LATEST_NAME}: is a folder, expected a file or nothing, because the tag of the newest"
            " checkpoint is written there; move it, or save in another folder"
        )


def clear_leftovers(root: Path, only_tag: str | None = None) -> None:
    """Remove leftovers of killed saves. A checkpoint whose only copy has an `.old-` name gets its own name back.

    Args:
        only_tag: remove only leftovers of this tag, because other jobs may be writing other tags.
    """
    for path in sorted(root.iterdir()):
        found = _LEFTOVER.fullmatch(path.name)
        if found is not None and only_tag in (None, found["tag"]):
            if found["mark"] == _BEING_WRITTEN:
                _remove(path)
            elif os.path.lexists(root / found["tag"]) or not (path / INDEX_NAME).is_file():
                remove_replaced(path)
            else:
                os.rename(path, root / found["tag"])
        elif only_tag is None and _LEFT_FILES.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    try:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except FileNotFoundError:  # whoever let it go removes it too (`keeping.py`)
        logger.debug("%s: is being removed", path)
    except OSError as error:
        logger.warning("save_checkpoint: %s was left by a killed save and cannot be removed: %s", path, error)


def unfinished(root: Path) -> list[tuple[str, Path]]:
    """Tags and folders of leftovers of killed saves: checkpoints that were being written or replaced."""
    matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in root.iterdir()) if root.is_dir() else ()
    return sorted((found["tag"], path) for path, found in matches if found is not None)


def _replaced(root: Path, tag: str) -> list[Path]:
    matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(p for p, m in matches if m is not None and m["mark"] == _BEING_REPLACED and m["tag"] == tag)


def publish(temporary: Path, target: Path, *, latest: bool) -> Path | None:
    """Give a finished checkpoint its name, with which it exists. Then write its tag into `latest`, if asked.

    Files of others in the folder that had this name before are in the new one too.

    Returns:
        The folder of the checkpoint that had this name before, for `remove_replaced`; None if there was none.

    Raises:
        CheckpointError: what has this name is no checkpoint.
    """
    replaced = None
    check_target(target, latest=latest)
    if os.path.lexists(target):
        # Two renames are not atomic. After a kill between them, `find_checkpoint` finds the tag under its `.old-` name.
        replaced = target.with_name(f"{_BEING_REPLACED}{target.name}-{uuid.uuid4().hex[:12]}")
        carry_over(target, temporary)
    sync_folder(temporary)
    if replaced is not None:
        os.rename(target, replaced)
    os.rename(temporary, target)
    sync_folder(target.parent)
    if latest:
        replace_text(target.parent / LATEST_NAME, target.name)
    return replaced


def remove_replaced(folder: Path | None) -> None:
    """Remove the checkpoint that a new one of its name has replaced, but no file of others."""
    found = None if folder is None else _LEFTOVER.fullmatch(folder.name)
    if folder is None or found is None:
        return
    target = folder.with_name(found["tag"])
    try:
        if target.is_dir():
            carry_over(folder, target)  # what came while the new one got its name
    except OSError as error:
        logger.warning("%s: stays, because files of others in it cannot be put into %s: %s", folder, target, error)
        return
    _remove(folder)


def carry_over(old: Path, new: Path) -> None:
    """Put the files of others that lie in a checkpoint's folder into the one that replaces it."""
    for path in sorted(old.iterdir()) if old.is_dir() else ():
        goal = new / path.name
        if _OWN.fullmatch(path.name) or os.path.lexists(goal):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, goal, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(path, goal)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def foreign_files(folder: Path, own: set[str]) -> tuple[str, ...]:
    """Names in a checkpoint's folder that dsx did not write, such as config.json or a tokenizer."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in own))
