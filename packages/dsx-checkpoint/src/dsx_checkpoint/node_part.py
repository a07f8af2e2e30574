"""The part of a checkpoint in the folder of one node: `node.json`, in addition to the index (see `nodes/`).

`node.json` is one JSON object with a checksum of itself:

| key | content |
|---|---|
| `format`, `version` | `"dsx-checkpoint-node"`, `1` |
| `index` | the checksum of the index that belongs to it; all nodes' parts of one save have the same |
| `latest`, `saved_at` | as the index says; seconds since 1970 by the clock of rank 0: tells which save is the newest |
| `node`, `nodes` | the number of the node in the job that saved, and of how many |
| `spans` | file -> list of `[begin, end]`: the bytes that are there |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsx_core import replace_text, strict_json

from .checks import expect, expect_file_name, expect_int, expect_keys
from .errors import CheckpointCorruptError, CheckpointError, shown
from .files import read_text
from .format import CHECKSUM_MARK, INDEX_NAME, NODE_NAME, Index, digest_of, seal
from .spans import Spans

__all__ = ["NodePart", "all_of", "digest_of_index", "read_part", "refuse_part"]

_FORMAT, _VERSION = "dsx-checkpoint-node", 1
_KEYS = ("format", "version", "index", "latest", "saved_at", "node", "nodes", "spans", "checksum")


@dataclass(frozen=True)
class NodePart:
    """The part of one save that is in a folder; see the module's text."""

    index: str
    latest: bool
    saved_at: float
    node: int
    nodes: int
    spans: Spans

    def extended(self, spans: Spans) -> NodePart:
        """The same with more bytes."""
        return replace(self, spans=self.spans | spans)

    def write(self, folder: Path) -> None:
        """Write `node.json`; durable, and whole or not at all."""
        content: dict[str, Any] = {
            "format": _FORMAT, "version": _VERSION, "index": self.index, "latest": self.latest,
            "saved_at": self.saved_at, "node": self.node, "nodes": self.nodes,
            "spans": {file: [list(item) for item in items] for file, items in self.spans.by_file.items()},
        }  # fmt: skip
        replace_text(folder / NODE_NAME, seal(content))

    def covers(self, index: Index) -> bool:
        """Whether all bytes of the checkpoint are there."""
        return not all_of(index) - self.spans


def all_of(index: Index) -> Spans:
    """All bytes of all files."""
    return Spans.of((name, 0, file.nbytes) for name, file in index.files.items())


def read_part(folder: Path) -> NodePart | None:
    """The contents of a tag's folder; None where it has no `node.json`.

    Raises:
        CheckpointCorruptError: it is damaged.
    """
    path = folder / NODE_NAME
    try:
        text = read_text(path)
    except FileNotFoundError:
        return None
    try:
        return _parse(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path}: {error}; this node's part of the checkpoint is damaged") from error


def _parse(text: str) -> NodePart:
    body, mark, rest = text.rpartition(CHECKSUM_MARK)
    if not mark or rest != f'{digest_of(body)}"}}':
        raise ValueError("its checksum is wrong")
    data = strict_json.parse(text)
    expect_keys("node.json", data, _KEYS)
    if (data["format"], data["version"]) != (_FORMAT, _VERSION):
        raise ValueError(f"got format {shown(data['format'])}, version {shown(data['version'])}, expected {_FORMAT}, 1")
    return NodePart(
        index=expect(data["index"], str),
        latest=expect(data["latest"], bool),
        saved_at=float(expect(data["saved_at"], float)),
        node=expect_int(data["node"]),
        nodes=expect_int(data["nodes"]),
        spans=Spans.of(_ranges(expect(data["spans"], dict))),
    )


def _ranges(spans: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    for file, items in spans.items():
        for begin, end in expect(items, list):
            yield expect_file_name(file), expect_int(begin), expect_int(end)


def refuse_part(folder: Path, index: Index) -> None:
    """Raise `CheckpointError` where a folder has only some bytes of its checkpoint."""
    part = read_part(folder)
    if part is not None and not part.covers(index):
        raise CheckpointError(
            f"{folder}: holds the part of node {part.node} of {part.nodes}, saved with "
            "checkpoint.use_node_local_storage. Load it by an engine with this setting, or make one checkpoint from "
            "the folders of the nodes: dsx checkpoint join FOLDER FOLDER ... TARGET"
        )


def digest_of_index(folder: Path) -> str:
    """The identity of the index in a folder: the checksum that it states itself, else one of its text (indices of the
    first version say none). Nothing is verified.
    """
    length = 64 + 2  # the checksum, and what closes the text
    with (folder / INDEX_NAME).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - length - len(CHECKSUM_MARK)))
        tail = file.read().decode(errors="replace")
    if tail.startswith(CHECKSUM_MARK):
        return tail[len(CHECKSUM_MARK) : -2]
    return digest_of(read_text(folder / INDEX_NAME))
