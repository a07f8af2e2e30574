"""A load if each node has its own disk: a checkpoint is joined from its parts on all disks.

    1) list      each node says which tags it has, and which bytes of them (`node.json`)
    2) choose    the newest tag of which every byte is on some disk
    3) wish      every rank goes through its load without reading, and notes the regions that it asks for
    4) bring     bytes that a node needs and does not have are sent by nodes that have them, and written to its disk
    5) load      as from a folder that all ranks see (`loading.py`): every rank finds its bytes on its own node

If 4 or 5 finds bytes that differ from the saved ones, they are repaired from copies (`repairing.py`), and both are
done again.

A node that lost its disk, or is new, has no folder of the tag, and gets one. So a load repairs what it needs, and works
in the same way for any number of nodes and any place of a rank. Bytes that a node received stay on its disk and are
noted in `node.json`.

A save that was killed while the nodes gave their folders the new name leaves some of them under the name of an
unfinished or a replaced checkpoint. These count too, if one node has finished: all folders were complete by then.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from dsx_core import replace_text, sync_folder

from ..boxes import Region, why_not_a_tiling
from ..errors import CheckpointCorruptError, CheckpointError
from ..files import read_text
from ..folder import carry_over, check_tag, check_target, refuse_foreign, temporary_name
from ..format import DTYPES, INDEX_NAME, LATEST_NAME, Index
from ..loading import LoadRequest
from ..node_part import NodePart, all_of, digest_of_index, read_part
from ..parsing import parse_index
from ..ranks import Ranks
from ..reading import Reader
from ..spans import Spans, spans_of_region
from .finding import Found, check_complete, look_into, saves_of
from .repairing import mend
from .saving import create_sparse
from .topology import Nodes
from .transfers import Transfer, in_rounds, run_transfers, transfers_between

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["bring", "candidates", "mend_copies"]

Key = tuple[str, str]
"""Family and name of a tensor."""


# - Which checkpoints there are


def candidates(nodes: Nodes, root: Path, tag: str | None, ranks: Ranks) -> Iterator[str]:
    """The tags that a load tries one after the other: the one that is asked for; else the one that the nodes' files
    `latest` name, where they agree; else the newest, then older ones. Collective.

    Raises:
        CheckpointError: there is something, but no such checkpoint.
    """

    def look() -> tuple[list[tuple[str, bool, float]], str]:
        if tag is not None:
            check_tag(tag)
        if root.exists() and not root.is_dir():
            raise CheckpointError(f"{root}: is a file, expected the folder that save_checkpoint was given")
        if not nodes.leads(ranks.rank):
            return [], ""
        if root.is_dir():
            refuse_foreign(root)
        latest = root / LATEST_NAME
        named = read_text(latest).strip() if latest.is_file() else ""
        return [(f.tag, f.part.latest, f.part.saved_at) for f in look_into(root) if f.committed], named

    everyone = ranks.run("finding a checkpoint", look)
    known = [item for items, _ in everyone for item in items]
    tags = sorted({name for name, *_ in known})
    if tag is not None:
        if tag not in tags:
            raise CheckpointError(f"{root}: no node has a checkpoint {tag!r}; tags there: {', '.join(tags) or 'none'}")
        yield tag
        return
    newest: dict[str, float] = {}
    for name, latest, saved_at in known:
        if latest:
            newest[name] = max(saved_at, newest.get(name, 0.0))
    named = {name for _, name in everyone if name}
    order = sorted(newest, key=lambda name: (named == {name}, newest[name]), reverse=True)
    if tags and not order:
        raise CheckpointError(
            f"{root}: has only checkpoints that were saved with save_latest=False: {', '.join(tags)}; pass a tag"
        )
    yield from order


# - Which bytes they need


class _Wishes(Reader):
    """Notes the regions that are asked for, and answers with zeros."""

    def __init__(self, folder: Path, index: Index, **options: Any) -> None:
        super().__init__(folder, index, **{**options, "verify": False})
        self.regions: list[tuple[Key, Region]] = []

    def _read_region(self, key: Key, region: Region) -> torch.Tensor:
        self.regions.append((key, region))
        dtype = getattr(torch, DTYPES[self.index.tensors[key[0]][key[1]].spec.dtype][0])
        return torch.zeros((), dtype=dtype).expand(region.numel)  # takes no memory


def _wished(request: LoadRequest, folder: Path, index: Index, ranks: Ranks) -> Spans:
    """The bytes that this rank is going to read. Collective."""

    def note() -> list[tuple[Key, Region]]:
        wishes = _Wishes(folder, index, **request.options)
        request.compare(wishes)
        request.read(wishes, ranks)
        return wishes.regions

    everyone = ranks.run(f"listing what is needed of {folder.name}", note)
    parts: dict[Key, set[Region]] = {}  # regions that are not whole tensors, of all ranks
    for regions in everyone:
        for key, region in regions:
            if region.numel != index.tensors[key[0]][key[1]].spec.numel:
                parts.setdefault(key, set()).add(region)
    alone = {
        key for key, regions in parts.items() if why_not_a_tiling(index.tensors[key[0]][key[1]].spec.shape, regions)
    }
    return Spans.of(
        (file, begin, end)
        for key, region in everyone[ranks.rank]
        for file, begin, end in _bytes_of(index, key, region, whole_chunks=request.verify and key in alone)
    )


def _bytes_of(index: Index, key: Key, region: Region, *, whole_chunks: bool) -> Iterator[tuple[str, int, int]]:
    """Where a region lies. Where the ranks' regions do not make up the tensor, whole chunks are read to verify them."""
    entry = index.tensors[key[0]][key[1]]
    first = entry.placed.offset
    for file, begin, end in spans_of_region(entry.placed, region):
        if whole_chunks:
            begin = first + entry.chunks.span(entry.chunks.at(begin - first))[0]
            end = first + entry.chunks.span(entry.chunks.at(end - 1 - first))[1]
        yield file, begin, end


def _headers(index: Index) -> Spans:
    return Spans.of((name, 0, file.header_bytes) for name, file in index.files.items())


# - Bringing them


def bring(nodes: Nodes, root: Path, tag: str, request: LoadRequest, ranks: Ranks) -> None:
    """Make the folder of `tag` on each node hold all bytes that the node's ranks are going to read. Collective.

    Raises:
        CheckpointCorruptError: bytes lie on no disk; names the nodes whose parts there are.
        CheckpointError: what is there does not fit the model, or a disk is full.
    """
    me, leads = nodes.of_rank[ranks.rank], nodes.leads(ranks.rank)
    held, text = _chosen(_parts_of(tag, nodes, root, ranks), root, tag, nodes, ranks)
    index = parse_index(text, str(root / tag / INDEX_NAME))
    save = next(iter(held.values())).part

    def settle() -> None:
        if leads:
            _settle(root, tag, held.get(me), text, index, replace(save, node=me, nodes=nodes.count, spans=Spans()))

    ranks.keep(f"making {tag} ready", settle)
    have = [held[node].part.spans & all_of(index) if node in held else Spans() for node in range(nodes.count)]
    wishes = ranks.gather(_wished(request, root / tag, index, ranks) | (_headers(index) if leads else Spans()))
    transfers = planned_transfers(nodes, wishes, have, tag)
    if not transfers:
        return
    if ranks.rank == 0:
        logger.warning(
            "load_checkpoint: %s: %.1f MB travel between nodes, because they are needed where they do not lie",
            root / tag, sum(transfer.nbytes for transfer in transfers) / 1e6,
        )  # fmt: skip
    ranks.keep(f"bringing bytes of {tag}", lambda: run_transfers(ranks, transfers, root / tag))
    got = Spans.of(item for t in transfers if nodes.of_rank[t.target] == me for item in t.ranges)

    def note() -> None:
        part = read_part(root / tag) if leads and got else None
        if part is not None:
            part.extended(got).write(root / tag)

    ranks.keep(f"noting what came of {tag}", note)


def _parts_of(tag: str, nodes: Nodes, root: Path, ranks: Ranks) -> dict[int, list[Found]]:
    """Node -> what its disk has of a tag. Collective."""
    leads = nodes.leads(ranks.rank)
    mine = ranks.run("finding a checkpoint", lambda: [f for f in look_into(root) if f.tag == tag] if leads else [])
    return {nodes.of_rank[rank]: found for rank, found in enumerate(mine) if nodes.leads(rank)}


def mend_copies(nodes: Nodes, root: Path, tag: str, ranks: Ranks) -> bool:
    """A load has found damage: let copies on other nodes mend it. Collective, with the same answer on all ranks.

    Returns:
        Whether anything was repaired. False: no node has the right bytes, or the damage is elsewhere.
    """
    try:
        held, text = _chosen(_parts_of(tag, nodes, root, ranks), root, tag, nodes, ranks)
        index = parse_index(text, str(root / tag / INDEX_NAME))
        folders = {node: root / one.name for node, one in held.items()}
        have = [held[node].part.spans & all_of(index) if node in held else Spans() for node in range(nodes.count)]
        damage = mend(nodes, folders, index, have, ranks)
    except CheckpointError as error:  # the same on all ranks
        logger.debug("nothing is mended: %s", error)
        return False
    if damage.nodes and not damage.lost and ranks.rank == 0:
        logger.warning(
            "load_checkpoint: %s: %d damaged bytes on the disks of nodes %s were written again from copies on other"
            " nodes; look at these disks",
            root / tag, damage.nbytes, damage.nodes,
        )  # fmt: skip
    if damage.lost and ranks.rank == 0:
        file, begin, end = next(iter(damage.lost))
        logger.warning(
            "load_checkpoint: %s: %d bytes are damaged on every disk that has them, the first are %d to %d of %s",
            root / tag, damage.lost.nbytes, begin, end, file,
        )  # fmt: skip
    return bool(damage.nodes) and not damage.lost


def _chosen(
    by_node: Mapping[int, Sequence[Found]], root: Path, tag: str, nodes: Nodes, ranks: Ranks
) -> tuple[dict[int, Found], str]:
    """Of the saves under this tag the newest of which every byte is somewhere: node -> its folder, and the index."""
    problem: CheckpointError = CheckpointCorruptError(f"{tag}: no node has a part of it that can be read")
    for held in saves_of(by_node):
        try:
            text, index = _index_of(held, root, nodes, ranks)
            check_complete(held, index, Path(tag))
        except CheckpointCorruptError as error:
            problem = error
            continue
        return held, text
    raise problem


def _index_of(held: Mapping[int, Found], root: Path, nodes: Nodes, ranks: Ranks) -> tuple[str, Index]:
    """The text of the index from the first node on which it is whole. Collective."""
    problem = None
    for node, found in sorted(held.items()):
        source, path = nodes.ranks_of(node)[0], root / found.name / INDEX_NAME
        read = functools.partial(_read_index, path, found.part) if source == ranks.rank else str
        try:
            text = ranks.run(f"opening the index of {found.tag} on node {node}", read)[source]
            return text, parse_index(text, str(path))
        except CheckpointError as error:
            problem = error
    raise CheckpointCorruptError(f"{problem}")


def _read_index(path: Path, part: NodePart) -> str:
    text = read_text(path)
    parse_index(text, str(path))
    if digest_of_index(path.parent) != part.index:
        raise CheckpointCorruptError(f"{path}: is not the index that node.json was written for")
    return text


def _settle(root: Path, tag: str, found: Found | None, text: str, index: Index, empty: NodePart) -> None:
    """Let this node have the folder `tag` with this index: give a folder its name back, or make one without bytes.

    Args:
        found: the node's folder of this save.
        empty: what is noted for a new folder.
    """
    target = root / tag
    if found is not None and found.committed:
        if (target / INDEX_NAME).read_bytes() != text.encode():
            replace_text(target / INDEX_NAME, text)
        return
    check_target(target, latest=False)
    source = root / (temporary_name(tag, uuid.uuid4().hex[:12]) if found is None else found.name)
    if found is None:
        source.mkdir(parents=True)
        try:
            for name, file in index.files.items():
                create_sparse(source / name, b"", file.nbytes, ())
            replace_text(source / INDEX_NAME, text)
            empty.write(source)
        except BaseException:
            shutil.rmtree(source, ignore_errors=True)
            raise
    if target.exists():  # another save of the same tag, of which too little is left
        carry_over(target, source)
        os.rename(target, root / temporary_name(tag, uuid.uuid4().hex[:12]))
    os.rename(source, target)
    sync_folder(root)


def planned_transfers(nodes: Nodes, wishes: Sequence[Spans], have: Sequence[Spans], folder: str) -> list[Transfer]:
    """The messages that bring every rank's wishes to its node. Pure.

    Raises:
        CheckpointCorruptError: something that is wished for lies nowhere.
    """
    found: list[Transfer] = []
    for node in range(nodes.count):
        missing = Spans.of(item for rank in nodes.ranks_of(node) for item in wishes[rank]) - have[node]
        for source in nodes.after(node):  # the copy of what a node has saved lies on the next one
            taken = missing & have[source]
            found += transfers_between(nodes, source, node, taken)
            missing = missing - taken
        if missing:
            raise CheckpointCorruptError(f"{folder}: {missing.nbytes} bytes that node {node} needs lie on no disk")
    return in_rounds(nodes, found)
