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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from dsx_core import replace_text, sync_folder

from ..boxes import Region
from ..errors import CheckpointCorruptError, CheckpointError
from ..files import read_text
from ..folder import carry_over, check_tag, check_target, refuse_foreign, temporary_name
from ..format import DTYPES, FAMILIES, INDEX_NAME, LATEST_NAME, Index
from ..loading import LoadRequest
from ..node_part import NodePart, all_of, digest_of_index, read_part
from ..parsing import parse_index
from ..ranks import Ranks
from ..reading import Reader
from ..reads import Reads
from ..spans import Range, Spans, spans_of_region
from .finding import Found, check_complete, look_into, saves_of
from .repairing import mend
from .saving import create_sparse
from .topology import Nodes
from .transfers import Holders, Transfer, by_rank, planned_transfers, run_transfers

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

    def order(everyone: Sequence[tuple[list[tuple[str, bool, float]], str]]) -> list[list[str]]:
        return [_in_order(root, tag, everyone)] * ranks.world_size

    yield from ranks.through_first("finding a checkpoint", look, order)


def _in_order(root: Path, tag: str | None, everyone: Sequence[tuple[list[tuple[str, bool, float]], str]]) -> list[str]:
    """The tags to try, from what each node has and the tag that its file `latest` names."""
    known = [item for items, _ in everyone for item in items]
    tags = sorted({name for name, *_ in known})
    if tag is not None:
        if tag not in tags:
            raise CheckpointError(f"{root}: no node has a checkpoint {tag!r}; tags there: {', '.join(tags) or 'none'}")
        return [tag]
    newest: dict[str, float] = {}
    for name, latest, saved_at in known:
        if latest:
            newest[name] = max(saved_at, newest.get(name, 0.0))
    named = {name for _, name in everyone if name}
    found = sorted(newest, key=lambda name: (named == {name}, newest[name]), reverse=True)
    if tags and not found:
        raise CheckpointError(
            f"{root}: has only checkpoints that were saved with save_latest=False: {', '.join(tags)}; pass a tag"
        )
    return found


# - Which bytes they need


class _Wishes(Reader):
    """Notes the regions that are asked for, and answers with zeros."""

    def __init__(self, folder: Path, index: Index, **options: Any) -> None:
        super().__init__(folder, index, **{**options, "verify": False})
        self.regions: list[tuple[Key, Region]] = []

    def _read_region(self, key: Key, region: Region) -> torch.Tensor:
        self.regions.append((key, region))
        dtype = getattr(torch, DTYPES[self.index.tensors[key[0]][key[1]].spec.dtype][0])
        return torch.zeros((), dtype=dtype, device="cpu").expand(region.numel)  # takes no memory


def _wished(request: LoadRequest, folder: Path, index: Index, ranks: Ranks) -> Spans:
    """The bytes that this rank is going to read. Collective."""
    keys = [(family, name) for family in FAMILIES for name in index.tensors[family]]  # the same on all ranks
    entries = [index.tensors[family][name] for family, name in keys]
    numbers = {key: number for number, key in enumerate(keys)}
    wishes: list[tuple[Key, Region]] = []

    def note() -> Reads:
        reader = _Wishes(folder, index, **request.options)
        request.compare(reader)
        request.read(reader, ranks)
        wishes.extend(reader.regions)
        found = Reads()
        for key, region in wishes:
            if region.numel != index.tensors[key[0]][key[1]].spec.numel:
                found.add(numbers[key], region, {})
        return found

    alone = ranks.joined_first(
        f"listing what is needed of {folder.name}",
        note,
        lambda one, other: Reads.joined(one, other, entries.__getitem__),
        lambda found: [found.judge(entries.__getitem__)] * ranks.world_size,
    )
    cut = {keys[number] for number in alone}
    return Spans.of(
        (file, begin, end)
        for key, region in wishes
        for file, begin, end in _bytes_of(index, key, region, whole_chunks=request.verify and key in cut)
    )


def _bytes_of(index: Index, key: Key, region: Region, *, whole_chunks: bool) -> Iterator[tuple[str, int, int]]:
    """Bytes of a region. Where the ranks' regions do not make up the tensor, whole chunks are read to verify them."""
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
    chosen = _chosen(nodes, root, tag, ranks)
    index, empty = chosen.index, replace(chosen.part, node=me, nodes=nodes.count, spans=Spans())
    ranks.keep(
        f"making {tag} ready", lambda: _settle(root, tag, chosen.here, chosen.text, index, empty) if leads else None
    )
    needed = _wished(request, root / tag, index, ranks) | (_headers(index) if leads else Spans())

    def lacking() -> Spans:
        part = read_part(root / tag)
        return needed - (all_of(index) if part is None else part.spans & all_of(index))

    def deal_out(missing: Sequence[Spans]) -> list[tuple[bool, list[Transfer], Spans]]:
        transfers = planned_transfers(nodes, missing, chosen.holders(), tag)
        if transfers:
            logger.warning(
                "load_checkpoint: %s: %.1f MB travel between nodes, because they are needed where they do not lie",
                root / tag, sum(transfer.nbytes for transfer in transfers) / 1e6,
            )  # fmt: skip
        came: list[list[Range]] = [[] for _ in range(nodes.count)]
        for transfer in transfers:
            came[nodes.of_rank[transfer.target]] += transfer.ranges
        return [
            (bool(transfers), mine, Spans.of(came[node]) if nodes.leads(rank) else Spans())
            for (rank, node), mine in zip(enumerate(nodes.of_rank), by_rank(nodes, transfers))
        ]

    any_travels, transfers, came = ranks.through_first(f"listing what is missing of {tag}", lacking, deal_out)
    if not any_travels:
        return
    ranks.keep(f"bringing bytes of {tag}", lambda: run_transfers(ranks, transfers, root / tag))

    def note() -> None:
        part = read_part(root / tag) if came else None
        if part is not None:
            part.extended(came).write(root / tag)

    ranks.keep(f"noting what came of {tag}", note)


def mend_copies(nodes: Nodes, root: Path, tag: str, ranks: Ranks) -> bool:
    """A load has found damage: let copies on other nodes mend it. Collective, with the same answer on all ranks.

    Returns:
        Whether anything was repaired. False: no node has the right bytes, or the damage is elsewhere.
    """
    try:
        chosen = _chosen(nodes, root, tag, ranks)
        here, index = chosen.here, chosen.index
        folder = None if here is None else root / here.name
        have = Spans() if here is None else here.part.spans & all_of(index)
        return mend(nodes, str(root / tag), folder, have, index, chosen.holders(), ranks)
    except CheckpointError as error:  # the same on all ranks
        logger.debug("nothing is mended: %s", error)
        return False


@dataclass(frozen=True)
class _Save:
    """One save under a tag, of which nodes have parts.

    Attributes:
        part: of any node, without its bytes.
        teller: the lowest rank of the first node that has one.
    """

    part: NodePart
    teller: int


@dataclass(frozen=True)
class _Chosen(_Save):
    """The save that is loaded.

    Attributes:
        text, index: its index.
        here: what this rank's node has of it.
        held: on rank 0, node -> what it has.
    """

    text: str
    index: Index
    here: Found | None
    held: Mapping[int, Found]

    def holders(self) -> Holders:
        """The bytes that each node holds; on rank 0."""
        whole = all_of(self.index)
        return Holders.of({node: found.part.spans & whole for node, found in self.held.items()})


def _chosen(nodes: Nodes, root: Path, tag: str, ranks: Ranks) -> _Chosen:
    """Of the saves under this tag the newest of which every byte is somewhere. Collective. Rank 0 alone learns which
    bytes the nodes have.
    """
    mine: list[Found] = []
    known: list[dict[int, Found]] = []

    def look() -> list[Found]:
        mine.extend(found for found in look_into(root) if found.tag == tag)
        return mine if nodes.leads(ranks.rank) else []

    def order(everyone: Sequence[list[Found]]) -> list[list[_Save]]:
        known.extend(saves_of({nodes.of_rank[rank]: found for rank, found in enumerate(everyone) if found}))
        saves = [
            _Save(replace(next(iter(held.values())).part, spans=Spans()), nodes.ranks_of(min(held))[0])
            for held in known
        ]
        return [saves] * ranks.world_size

    problem: CheckpointError = CheckpointCorruptError(f"{tag}: no node has a part of it that can be read")
    for number, save in enumerate(ranks.through_first("finding a checkpoint", look, order)):
        ours = sorted((found for found in mine if found.part.index == save.part.index), key=lambda one: one.committed)
        here = ours[-1] if ours else None  # as `saves_of` chooses
        held = known[number] if ranks.rank == 0 else {}
        try:
            text, index = _index_of(save, here, held, tag, root, nodes, ranks)
            ranks.through_first("", lambda: None, functools.partial(_complete, held, index, tag, ranks))
        except CheckpointCorruptError as error:
            problem = error
            continue
        return _Chosen(save.part, save.teller, text, index, here, held)
    raise problem


def _complete(held: Mapping[int, Found], index: Index, tag: str, ranks: Ranks, _: object) -> list[None]:
    check_complete(held, index, Path(tag))
    return [None] * ranks.world_size


def _index_of(
    save: _Save, here: Found | None, held: Mapping[int, Found], tag: str, root: Path, nodes: Nodes, ranks: Ranks
) -> tuple[str, Index]:
    """The text of the index from the first node on which it is whole. Collective.

    Args:
        here: what this rank's node has.
        held: on rank 0, node -> what it has.
    """
    following = iter([nodes.ranks_of(node)[0] for node in sorted(held)][1:])
    teller: int | None = save.teller
    words = ""

    def read() -> tuple[str, str] | None:
        """The text, or what is wrong with it."""
        if ranks.rank != teller or here is None:
            return None
        try:
            return _read_index(root / here.name / INDEX_NAME, save.part), ""
        except (CheckpointError, OSError) as error:
            return "", f"rank {ranks.rank}: {error}"

    def answer(told: tuple[str, str] | None) -> list[tuple[str, str, int | None]]:
        text, wrong = told or ("", f"rank {teller} does not find it any more")
        return [(text, wrong, None if text else next(following, None))] * ranks.world_size

    while teller is not None:
        text, words, teller = ranks.joined_first(
            f"opening the index of {tag}", read, lambda one, other: one or other, answer
        )
        if text:
            return text, parse_index(text, str(root / tag / INDEX_NAME))
    raise CheckpointCorruptError(f"opening the index of {tag}: {words}")


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
