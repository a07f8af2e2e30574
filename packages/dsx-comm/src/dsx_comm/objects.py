"""Collectives on picklable objects. Pickles travel as byte tensors, after their lengths.

They are for ranks that trust each other: unpickling runs code. On groups without a host backend (nccl alone) the bytes
go through the current CUDA device. Every byte is counted under the name of the public function.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from dsx_core import RanksDifferError, Together

from .calls import Call, Labels, check_labels, guarded, run, share_volume
from .checks import root
from .collectives import settle, start_all_gather
from .errors import CommArgumentError, CommError
from .groups import is_initialized, member
from .object_tree import NotJoined, ObjectTree, host_bytes
from .on_demand import MANY_RANKS
from .rooted import start_broadcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
_SPEAKERS = 8  # at most so many ranks have more to say than the others
_EVEN_BYTES = 1 << 20  # up to here all ranks receive as much as the longest message has


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **labels: Unpack[Labels]) -> None:
    """object_list[p] = rank p's `obj`; the list must have one entry per rank."""
    to = member(group)
    _check_list(object_list, to.size, "all_gather_object", "object_list")
    data = pickle.dumps(obj)
    device = to.message_device
    lengths = torch.zeros(to.size, dtype=torch.int64, device=device)
    ask = Call("all_gather_object", to.group, to.size, 8, 0, device, {})
    guarded(ask, lambda: settle(start_all_gather(lengths, torch.tensor([len(data)], device=device), to), False))
    sizes: list[int] = lengths.tolist()
    common = _common_length(sizes)
    sent = share_volume(common + 8, to.size) + (len(data) if len(data) > common else 0)
    call = Call("all_gather_object", to.group, to.size, max(sizes), sent, device, check_labels(labels))

    def issue() -> None:
        source = torch.zeros(common, dtype=torch.uint8, device=device)
        if len(data) <= common:
            source[: len(data)] = _tensor(data, device)
        output = torch.empty(to.size * common, dtype=torch.uint8, device=device)
        settle(start_all_gather(output, source, to), False)
        rows = output.cpu().view(to.size, common)
        for rank, length in enumerate(sizes):
            if length > common:
                mine = rank == to.rank
                long = _tensor(data, device) if mine else torch.empty(length, dtype=torch.uint8, device=device)
                settle(start_broadcast(long, to.ranks[rank], rank, to), False)
                object_list[rank] = obj if mine else _load(long.cpu())
            else:
                object_list[rank] = obj if rank == to.rank else _load(rows[rank, :length])

    run(call, issue)


def _common_length(sizes: Sequence[int]) -> int:
    """The length of the messages that all ranks send. Where a few of many ranks have much to say and the others little,
    it is that of the others, and those few send theirs one after the other: otherwise each rank would receive as much
    from every rank as from the one with the longest message.
    """
    longest = max(sizes)
    if len(sizes) < 3 or longest * len(sizes) <= _EVEN_BYTES:
        return longest
    *others, _ = sorted(sizes)[: max(2, len(sizes) - _SPEAKERS + 1)]
    short = others[-1]
    received = short * len(sizes) + sum(size for size in sizes if size > short)
    return short if 2 * received < longest * len(sizes) else longest


def together(
    group: Any = None,
    *,
    kinds: Sequence[type[Exception]] = (CommError,),
    differ: type[Exception] = RanksDifferError,
) -> Together:
    """The ranks of a group, for work after which all go on or all raise the same error; this process alone if there is
    no process group.

    Args:
        group: a process group; None: all ranks.
        kinds, differ: classes of the errors, see `dsx_core.Together`.
    """
    if not is_initialized():
        return Together(lambda value: [value], 0, 1, kinds, differ)
    to = member(group)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * to.size
        all_gather_object(values, value, group=group)
        return values

    return Together(gather, to.rank, to.size, kinds, differ)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | str | None = None,
    group_src: int | None = None,
    **labels: Unpack[Labels],
) -> None:
    """Replace the entries of `object_list` by those of global rank `src` (default 0). All lists are of one length.

    Objects are pickled: receive from ranks of your own job only. `group_src` gives the rank within `group` instead;
    `device` is where the bytes travel, by default the group's.

    Raises:
        CommArgumentError: no list, an empty one, or a rank that is not in the group.
    """
    to = member(group)
    if not isinstance(object_list, list) or not object_list:
        raise CommArgumentError("broadcast_object_list: object_list: expected a list with at least one entry")
    src, source = root(src, group_src, to, "broadcast_object_list", "src", 0)
    where = to.message_device if device is None else torch.device(device)
    data = [pickle.dumps(obj) for obj in object_list] if to.rank == source else []
    lengths = torch.tensor([len(d) for d in data] or [0] * len(object_list), dtype=torch.int64, device=where)
    size = sum(map(len, data))
    sent = size + 8 * len(object_list) if to.rank == source and to.size > 1 else 0
    call = Call("broadcast_object_list", to.group, to.size, size, sent, where, check_labels(labels))

    def issue() -> None:
        settle(start_broadcast(lengths, src, source, to), False)
        sizes = lengths.tolist()
        payload = _tensor(b"".join(data), where) if data else torch.empty(sum(sizes), dtype=torch.uint8, device=where)
        settle(start_broadcast(payload, src, source, to), False)
        if to.rank != source:
            object_list[:] = [_load(part) for part in payload.cpu().split(sizes)]

    run(call, issue)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    **labels: Unpack[Labels],
) -> None:
    """On global rank `dst` (default 0): object_gather_list[p] = rank p's `obj`; elsewhere the list is ignored.

    Each rank passes on what a few others have sent it (`object_tree.py`), so that no rank receives from all.
    """
    to = member(group)
    _, target = root(dst, group_dst, to, "gather_object", "dst", 0)
    if to.rank == target:
        _check_list(object_gather_list, to.size, "gather_object", "object_gather_list")
    data = b"" if to.rank == target else pickle.dumps(obj)
    parts = ObjectTree(to, target, "gather_object", check_labels(labels)).gather(data)
    if object_gather_list is not None and to.rank == target:
        for rank, part in enumerate(parts):
            object_gather_list[rank] = obj if rank == target else pickle.loads(part)


def join_objects(
    obj: T,
    joining: Callable[[T, T], T],
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    **labels: Unpack[Labels],
) -> T | None:
    """On global rank `dst` (default 0) what `joining` makes of all ranks' objects; None on the others.

    The objects of neighbours are joined, the lower rank's first (counted from `dst`), on the way: so no rank receives
    more than a few of them. `joining` must be associative, may change its first argument, and must not communicate.

    Raises:
        CommError: on all ranks, where `joining` has raised on one or an object cannot be pickled; that rank has the
            original error as `__cause__`.
    """
    to = member(group)
    _, target = root(dst, group_dst, to, "join_objects", "dst", 0)
    tree = ObjectTree(to, target, "join_objects", check_labels(labels))
    found = tree.join(obj, joining)
    words = found.words if isinstance(found, NotJoined) else ""
    failed = tree.scatter([words.encode()] * to.size if to.rank == target else []).decode()
    if failed or isinstance(found, NotJoined):
        raise CommError(failed) from tree.error
    return found


def merge_objects(obj: T, merging: Callable[[T, T], T], group: Any = None) -> T:
    """Merge all ranks' objects, two at a time, in rank order; every rank gets the result.

    For objects that say much the same on all ranks, or of which each has a part: of many ranks none receives more than
    a few objects and the result. `merging` is as `joining` of `join_objects`, and so are errors.
    """
    to = member(group)
    if to.size < MANY_RANKS:
        values: list[Any] = [None] * to.size
        all_gather_object(values, obj, group)
        return functools.reduce(merging, values)
    tree = ObjectTree(to, 0, "join_objects", {})
    found: list[Any] = [tree.join(obj, merging)]
    broadcast_object_list(found, group=group, group_src=0)
    if isinstance(found[0], NotJoined):
        raise CommError(found[0].words) from tree.error
    return found[0]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    **labels: Unpack[Labels],
) -> None:
    """scatter_object_output_list[0] = global rank `src`'s (default 0) scatter_object_input_list[rank].

    The input list has one object for each rank of `group`, and is needed on the source only. Objects are pickled, and
    each rank passes on what a few others are to get, as in `gather_object`.
    `group_src` gives the rank within `group` instead.

    Raises:
        CommArgumentError: the output list is empty, or the input list has another length than there are ranks.
    """
    to = member(group)
    _, source = root(src, group_src, to, "scatter_object_list", "src", 0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise CommArgumentError(
            "scatter_object_list: scatter_object_output_list: expected a list with at least one entry"
        )
    data: list[bytes] = []
    if to.rank == source:
        _check_list(scatter_object_input_list, to.size, "scatter_object_list", "scatter_object_input_list")
        objects = list(scatter_object_input_list or ())
        objects[source] = None  # it stays here
        pickles = {id(obj): pickle.dumps(obj) for obj in objects}  # one of what many ranks get
        data = [pickles[id(obj)] for obj in objects]
    mine = ObjectTree(to, source, "scatter_object_list", check_labels(labels)).scatter(data)
    if to.rank == source and scatter_object_input_list is not None:
        scatter_object_output_list[0] = scatter_object_input_list[source]
    else:
        scatter_object_output_list[0] = pickle.loads(mine)


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _load(tensor: torch.Tensor) -> Any:
    return pickle.loads(host_bytes(tensor))


def _check_list(values: Any, size: int, name: str, what: str) -> None:
    if not isinstance(values, Sequence) or len(values) != size:
        got = f"{len(values)} entries" if isinstance(values, Sequence) else type(values).__name__
        raise CommArgumentError(f"{name}: {what}: got {got}, expected a list of {size} (group size)")
