"""Finds the parts of checkpoints in the folders of nodes, and which of them are a whole checkpoint. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointCorruptError, CheckpointError
from ..files import read_text
from ..folder import tags_in, unfinished
from ..format import INDEX_NAME, Index
from ..node_part import NodePart, all_of, digest_of_index, read_part
from ..parsing import parse_index
from ..spans import Spans

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["Found", "check_complete", "look_into", "saves_of"]


@dataclass(frozen=True)
class Found:
    """A folder with a part of a save: `name` is its name now, `tag` the one that it has or was to have."""

    tag: str
    name: str
    part: NodePart

    @property
    def committed(self) -> bool:
        """Whether the save was over here."""
        return self.name == self.tag


def look_into(root: Path) -> list[Found]:
    """The contents of one node's folder. Parts that cannot be read are passed over with a warning."""
    found = []
    for tag, folder in [*((tag, root / tag) for tag in tags_in(root)), *unfinished(root)]:
        if not (folder / INDEX_NAME).is_file():
            continue
        try:
            found.append(Found(tag, folder.name, read_part(folder) or _whole(folder)))
        except (CheckpointError, OSError) as error:
            logger.warning("%s: passed over: %s", folder, error)
    return found


def _whole(folder: Path) -> NodePart:
    """A checkpoint without `node.json`: all its bytes are there."""
    path = folder / INDEX_NAME
    index = parse_index(read_text(path), str(path))
    return NodePart(digest_of_index(folder), index.latest, path.stat().st_mtime, 0, 1, all_of(index))


def saves_of(by_node: Mapping[int, Sequence[Found]]) -> list[dict[int, Found]]:
    """The saves of which the nodes have parts, the newest first, each as node -> its folder.

    Those that no node has finished are left out.
    """
    saves: dict[str, dict[int, Found]] = {}
    for node, found in by_node.items():
        for one in sorted(found, key=lambda one: one.committed):  # a committed folder counts more than another one
            saves.setdefault(one.part.index, {})[node] = one
    finished = [held for held in saves.values() if any(one.committed for one in held.values())]
    return sorted(finished, key=lambda held: max(one.part.saved_at for one in held.values()), reverse=True)


def check_complete(held: Mapping[int, Found], index: Index, folder: Path) -> None:
    """Raise `CheckpointCorruptError` where bytes lie on no disk."""
    lost = all_of(index) - Spans.of(item for one in held.values() for item in one.part.spans)
    if lost:
        nodes = max(one.part.nodes for one in held.values())
        there = sorted(one.part.node for one in held.values())
        file, begin, end = next(iter(lost))
        raise CheckpointCorruptError(
            f"{folder}: {lost.nbytes} bytes lie on no disk, the first are {begin} to {end} of {file}. It was saved by "
            f"{nodes} nodes, and there are the parts of nodes {there}. Each part lies on two nodes: start the job with "
            "one more of the nodes that saved it, or load another tag"
        )
