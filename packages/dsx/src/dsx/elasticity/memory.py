"""Snapshots in the memory of the nodes: folders in a file system that lies in memory, and outlives the processes.

    /dev/shm/dsx_elastic_<user>_<key>/<node>/step<N>-<12 hex digits>/    a node's part of the checkpoint of update N

A part has the files of a checkpoint (`docs/checkpoint-format.md`) at their full size, of which only some bytes are
there: the files are sparse, and what was not written takes no memory. `held.json` says which bytes are there. The key
belongs to the folder of the checkpoints on disk, so that the snapshots of a deleted run are never found by a new one.

A node's name is that of its machine and its launching agent, which outlives the ranks. Its ranks, and the agent of
`dsx launch`, hold the folder (`dsx_core.holding`). Parts of an agent that has died are read by the agents that come
after it on the machine, and removed once there is a newer snapshot; those of other jobs as `remove_leftovers` says.

Left out: who holds what, and moving parts between nodes (`peers.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from dsx_checkpoint.errors import CheckpointError
from dsx_checkpoint.files import opened, write_all
from dsx_checkpoint.format import INDEX_NAME
from dsx_checkpoint.plan import FileStart
from dsx_checkpoint.spans import Spans
from dsx_core.holding import HOLD_NAME, Hold, free, hold, note_in, remove_if_free

from ..utils.logging import logger

__all__ = ["NODE_VARIABLE", "NodeMemory", "Part", "node_name", "note_held", "remove_leftovers", "step_of"]

NODE_VARIABLE = "DSX_ELASTIC_NODE"
HELD_NAME = "held.json"
_NOTE = ".held-"
_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"step(?P<step>[0-9]+)-[0-9a-f]{12}")
_UNFINISHED = ".tmp-"
KEEP_S = 3600.0
"""Seconds for which the snapshots of a killed job are kept though other elastic jobs start: it may come back."""
_KEY_NAME = ".elastic"


def node_name() -> str:
    """This node's name: the variable DSX_ELASTIC_NODE, else machine and process of the agent that started this rank."""
    return os.environ.get(NODE_VARIABLE) or f"{socket.gethostname()}-{os.getppid()}"


def step_of(name: str) -> int | None:
    """The update of a snapshot of this name; None where it is not the name of one."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found["step"])


@dataclass(frozen=True)
class Part:
    """The part of one snapshot that a node holds.

    Attributes:
        name: of the snapshot; there are no two of one name.
        places: folders, and which bytes each of them has.
    """

    name: str
    places: tuple[tuple[Path, Spans], ...]

    @property
    def held(self) -> Spans:
        """The ranges of bytes that are there."""
        return Spans.of(item for _, held in self.places for item in held)

    @property
    def folder(self) -> Path:
        """A folder with the index and the starts of all files."""
        return self.places[0][0]

    def read(self, file: str, start: int, stop: int) -> bytearray:
        """Bytes of a file. Raises `CheckpointError` unless all of them are held."""
        data, missing = bytearray(stop - start), Spans.of([(file, start, stop)])
        for folder, held in self.places:
            for _, first, behind in missing & held:
                with opened(folder / file, os.O_RDONLY) as fd:
                    data[first - start : behind - start] = os.pread(fd, behind - first, first)
            missing = missing - held
        if missing or len(data) != stop - start:
            raise CheckpointError(f"{self.folder}: bytes {start} to {stop} of {file} are not on this node")
        return data


class NodeMemory:
    """The snapshots of one node, and those that dead agents left on its machine.

    Args:
        root: the folder of all nodes of the machine.
        node: this node's name.
    """

    def __init__(self, root: Path, node: str) -> None:
        self.root, self.node = root, node
        self.path = root / node
        self._hold: Hold | None = None

    @staticmethod
    def open(disk: Path, node: str, place: str | os.PathLike[str] | None = None) -> NodeMemory:
        """The memory that belongs to a folder of checkpoints.

        Args:
            disk: the folder of the checkpoints on disk; the key is kept in it.
            place: a folder in memory; None: /dev/shm, or the temporary folder where there is none.

        Raises:
            CheckpointError: the folder in memory is another user's.
            OSError: one of the folders cannot be made.
        """
        home = Path(place) if place is not None else _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        root = home / f"dsx_elastic_{os.geteuid()}_{_key_of(disk)}"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.geteuid():
            raise CheckpointError(f"{root}: belongs to another user; remove it, or pass memory=<a folder in memory>")
        memory = NodeMemory(root, node)
        while memory._hold is None:
            root.mkdir(mode=0o700, exist_ok=True)
            memory.path.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # removed between the two calls, as one that nobody held
                memory._hold = hold(memory.path, str(disk.resolve()))
        return memory

    def parts(self) -> list[Part]:
        """Parts of all snapshots that this node can read, its own first where it has one."""
        found: dict[str, list[tuple[Path, Spans]]] = {}
        for folder in self._readable():
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if step_of(path.name) is not None and (path / INDEX_NAME).is_file() and (held := _held(path)):
                    found.setdefault(path.name, []).append((path, held))
        return [Part(name, tuple(places)) for name, places in found.items()]

    def _readable(self) -> list[Path]:
        return [self.path, *self._abandoned()]

    def _abandoned(self) -> Iterator[Path]:
        """Folders of agents of this machine that have died."""
        for folder in sorted(self.root.iterdir()):
            if folder != self.path and _is_left(folder):
                yield folder

    def make(self, name: str, files: Iterable[FileStart]) -> Path:
        """A new folder of this name with sparse files."""
        folder = self.path / f"{_UNFINISHED}{name}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        for file in files:
            with opened(folder / file.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
                os.ftruncate(fd, file.size)
                write_all(fd, memoryview(file.header), 0)
        return folder

    def finish(self, folder: Path, name: str, index: str) -> Path:
        """Give a folder its name: from here on it is a part of a snapshot, with the bytes that ranks have noted."""
        notes = sorted(folder.glob(f"{_NOTE}*"))
        held = Spans.of(item for note in notes for item in _spans_in(note))
        for note in notes:
            note.unlink()
        (folder / HELD_NAME).write_text(json.dumps(held.by_file))
        (folder / INDEX_NAME).write_text(index)
        folder.rename(self.path / name)
        return self.path / name

    def keep_only(self, name: str) -> None:
        """Remove all snapshots but this one, what unfinished ones have left, and the parts of dead agents."""
        others = [path for path in self.path.iterdir() if path.name not in (name, HOLD_NAME)]
        for path in (*others, *self._abandoned()):
            shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything of this node, and the common folder if no other node uses it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._hold is not None:
            self._hold.release()
        try:
            self.root.rmdir()
        except OSError:  # another node's parts are there
            logger.debug("%s stays: another node uses it", self.root)


def _is_left(folder: Path) -> bool:
    """Whether the folder of a node of this machine is nobody's any more: neither a rank nor a living agent's.

    The agents of torchrun hold nothing, so their process ids are asked for too. In another PID namespace that number is
    some other process' or nobody's; there the lock alone tells.
    """
    pid = folder.name.removeprefix(f"{socket.gethostname()}-")
    if pid == folder.name or not pid.isdecimal() or psutil.pid_exists(int(pid)):
        return False
    with free(folder) as is_free:
        return is_free


def remove_leftovers(own: NodeMemory) -> None:
    """Remove what other elastic jobs of this user have left on this machine, and nobody has come back for in time."""
    for root in own.root.parent.glob(f"{own.root.name.rpartition('_')[0]}_*"):
        if root == own.root:
            continue
        with suppress(OSError):  # another job removes it, or needs it
            if root.lstat().st_uid != os.geteuid() or root.is_symlink():
                continue
            for folder in sorted(root.iterdir()):
                said = note_in(folder) or "?"
                if _is_left(folder) and _age(folder) > KEEP_S and remove_if_free(folder):
                    logger.warning("elasticity: removed %s, which a job with checkpoints in %s has left", folder, said)
            root.rmdir()


def _age(folder: Path) -> float:
    """Seconds since the newest snapshot."""
    return time.time() - max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)


def _shortened(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _key_of(disk: Path) -> str:
    """The text that ties snapshots to a folder on disk: it is in that folder, written once."""
    disk.mkdir(parents=True, exist_ok=True)
    path = disk / _KEY_NAME
    mine = disk / f"{_KEY_NAME}.{uuid.uuid4().hex}"
    mine.write_text(uuid.uuid4().hex)
    try:
        os.link(mine, path)  # only the first of several ranks succeeds, and no rank sees half a text
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not path.exists():
            _agree_on_first(mine)
            os.replace(mine, path)
    finally:
        mine.unlink(missing_ok=True)
    return _shortened(path.read_text())


def _agree_on_first(text: Path) -> None:
    """Give the file the text of the first rank that calls this. It is the one whose folder gets the common name: a
    folder that is not empty is never replaced.
    """
    first, mine = text.with_name(f"{_KEY_NAME}.first"), text.with_name(f"{text.name}.d")
    mine.mkdir()
    (mine / "key").write_text(text.read_text())
    try:
        os.rename(mine, first)
    except OSError:
        shutil.rmtree(mine, ignore_errors=True)
        if not first.exists():
            raise
    text.write_text((first / "key").read_text())


def note_held(folder: Path, rank: int, held: Spans) -> None:
    """Note in an unfinished part which bytes a rank of this node has written there; see `NodeMemory.finish`."""
    (folder / f"{_NOTE}{rank}").write_text(json.dumps(held.by_file))


def _spans_in(path: Path) -> Spans:
    told = json.loads(path.read_text())
    return Spans.of((file, int(start), int(stop)) for file, ranges in told.items() for start, stop in ranges)


def _held(folder: Path) -> Spans:
    """The ranges of bytes that a part has; none if it has no readable list of them."""
    try:
        return _spans_in(folder / HELD_NAME)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.debug("%s: no readable %s: %s", folder, HELD_NAME, error)
        return Spans()
