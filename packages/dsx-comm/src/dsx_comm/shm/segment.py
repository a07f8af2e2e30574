"""The set-up of memory that the ranks of a group share, or the reason, the same on all ranks, why it is not possible.

Rank 0 makes an anonymous file in memory (memfd) and sends its descriptor to the others over a Unix socket with a random
abstract name, which travels through the group's store. The file has no name, so a killed process leaves nothing behind,
and the size of /dev/shm does not matter. A process that connects and finds the random nonce in the memory is on the
same machine; no other evidence counts. Every rank locks one byte of the file for as long as it lives. The kernel
releases the lock when the process ends, so that the others notice its end. All ranks get the same verdict.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import CommArgumentError, CommError
from ..meeting import fresh_prefix
from . import native

_POLL = 0.002
_TOKEN = b"dsx"
_DIFFER = "ShmOptions differ between ranks"  # begins the verdict that is no reason for gloo


class Unavailable(Exception):
    """Shared memory cannot serve this group; the text says why. All ranks of the group raise it."""


@dataclass(frozen=True)
class ShmOptions:
    """Sizes and habits of a group in shared memory; pass it as `pg_options` when making a group.

    Attributes:
        slice_bytes: bytes of one rank's part of a chunk; 0: 512 KiB by the number of ranks, at least 16 KiB.
        limit_bytes: most memory the group may take; slices shrink to fit, and below 4 KiB the group falls back to gloo.
        spin_us: microseconds a waiting rank looks again and again, giving way to others, before it sleeps; None: 300,
            or 50 where ranks outnumber cores.
        one_shot_bytes: all-reduces up to this size are computed by every rank at once; 0: chosen from the number of
            ranks.
        look_seconds: how long a sleeping rank sleeps before it looks whether the others' processes live. A rank that
            gives a group up wakes the others at once.
        stores: how large messages that go one way, or to several ranks, are written into shared memory: "plain", "past"
            the cache, or as a timed block of each chunk says ("measured": past it where the ranks' cores share no
            cache).
        warn: whether a fall back to gloo is a warning or only logged.
    """

    slice_bytes: int = 0
    limit_bytes: int = 1 << 30
    spin_us: float | None = None
    one_shot_bytes: int = 0
    look_seconds: float = 0.1
    stores: str = "measured"
    warn: bool = True

    def __post_init__(self) -> None:
        if self.slice_bytes < 0 or self.slice_bytes % 4096:
            raise CommArgumentError(f"slice_bytes: got {self.slice_bytes}, expected a multiple of 4096")
        if self.stores not in ("measured", "plain", "past"):
            raise CommArgumentError(f'stores: got {self.stores!r}, expected "measured", "plain" or "past"')
        if not 0 < self.look_seconds <= 3600:
            raise CommArgumentError(f"look_seconds: got {self.look_seconds}, expected more than 0 and at most 3600")
        if self.limit_bytes < 1:
            raise CommArgumentError(f"limit_bytes: got {self.limit_bytes}, expected at least 1")


@dataclass(frozen=True)
class Member:
    """This process as a member of a group: rank, size, and the store by which it reaches the others."""

    store: Any
    rank: int
    size: int
    patience: timedelta


MIN_SLICE = 4096
CHUNK = 512 * 1024  # of one rank's data, and as much of the others', stay in its second cache
MAILBOX = 260 * 1024  # of one slot of two: a message of 512 KiB with a header fits, so that its send ends at once


def slice_bytes(size: int, options: ShmOptions) -> int:
    """Bytes of a slice for `size` ranks within the options' limit. Raises Unavailable if none fits."""
    wanted = options.slice_bytes or max(16 * 1024, CHUNK // size // MIN_SLICE * MIN_SLICE)
    module = native.module()
    while module.sizes(size, wanted * size, wanted, MAILBOX)[1] > options.limit_bytes:
        wanted = wanted // 2 // MIN_SLICE * MIN_SLICE
        if wanted < MIN_SLICE:
            raise Unavailable(
                f"{size} ranks do not fit into {options.limit_bytes} bytes of shared memory (limit_bytes)"
            )
    return wanted


def make_segment(size: int, options: ShmOptions) -> tuple[int, tuple[int, int]]:
    """(descriptor, nonce) of a new segment for `size` ranks. Raises Unavailable."""
    module = native.module()
    piece = slice_bytes(size, options)
    total, _ = module.sizes(size, piece * size, piece, MAILBOX)
    nonce = (secrets.randbits(63), secrets.randbits(63))
    fd = -1
    try:
        fd = os.memfd_create("dsx-comm")
        os.ftruncate(fd, total)
        os.posix_fallocate(fd, 0, 4096)
        module.format(fd, size, piece * size, piece, MAILBOX, *nonce)
    except (OSError, RuntimeError) as error:
        if fd >= 0:
            os.close(fd)
        raise Unavailable(f"cannot make a shared-memory segment of {total} bytes: {error}") from error
    return fd, nonce


def reserve(fd: int, rank: int, size: int, eager: int) -> None:
    """Take this rank's part of the memory now, on its own NUMA node: later, a lack of memory would be a SIGBUS."""
    share = -(-eager // size // 4096) * 4096
    begin = rank * share
    try:
        os.posix_fallocate(fd, begin, max(4096, min(share, eager - begin)))
    except OSError as error:
        raise Unavailable(f"rank {rank}: cannot take {share} bytes of shared memory: {error}") from error


def hold_lock(fd: int, rank: int) -> None:
    """Lock byte `rank` until this process ends."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError as error:
        raise Unavailable(f"rank {rank}: cannot lock its byte of the segment: {error}") from error


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, str]]:
    name = "dsx-comm-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + name)
        server.listen(128)
        server.settimeout(_POLL)
        yield server, name


def _hand_out(server: socket.socket, fd: int) -> bool:
    """Give the descriptor to one process of the same user, if one asks; true if one asked."""
    try:
        peer, _ = server.accept()
    except TimeoutError:
        return False
    with peer:
        if _user_behind(peer) == os.getuid():
            socket.send_fds(peer, [_TOKEN], [fd])
    return True


def _user_behind(peer: socket.socket) -> int:
    """The user ID of the process at the other end, from the kernel."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def fetch(name: str, patience: float) -> int:
    """The descriptor that the listener `name` hands out. Raises Unavailable."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(patience)
            client.connect("\0" + name)
            if (user := _user_behind(client)) != os.getuid():
                # The store has told the name, and anybody who reaches the store may have put it there.
                raise Unavailable(f"the socket of the group's rank 0 belongs to another user ({user})")
            data, fds = _receive_descriptor(client)
    except OSError as error:
        raise Unavailable(f"not on the machine of the group's rank 0 (its socket does not answer: {error})") from error
    if data != _TOKEN or len(fds) != 1:
        raise Unavailable("the group's rank 0 refused to hand out its memory (another user?)")
    return fds[0]


def _receive_descriptor(client: socket.socket) -> tuple[bytes, list[int]]:
    """The bytes that were sent, and the descriptors with them.

    Not `socket.recv_fds`, which ignores its flags: programs that this process starts would inherit the descriptor, and
    with it the memory.
    """
    room = socket.CMSG_LEN(struct.calcsize("i"))
    data, messages, _, _ = client.recvmsg(16, room, socket.MSG_CMSG_CLOEXEC)
    found = [bytes(body) for level, kind, body in messages if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
    return data, [fd for body in found for (fd,) in struct.iter_unpack("i", body)]


def map_segment(me: Member, options: ShmOptions) -> int:
    """Make or get the group's segment; returns its descriptor, this rank's byte locked. Collective.

    Raises:
        Unavailable: on all ranks, with the same text.
        CommArgumentError: sizes in the options differ between ranks; on all ranks, with the same text.
        CommError: ranks did not come in time.
    """
    prefix = fresh_prefix(me.store, "segment", me.rank)
    me = replace(me, store=dist.PrefixStore(prefix, me.store))  # pyright: ignore[reportPrivateImportUsage]
    return _lead(me, options) if me.rank == 0 else _follow(me, options)


def _lead(me: Member, options: ShmOptions) -> int:
    fd = -1
    problem = native.reason()
    try:
        if not problem:
            fd, nonce = make_segment(me.size, options)
            hold_lock(fd, 0)
            _, eager = _sizes(fd)
            reserve(fd, 0, me.size, eager)
    except Unavailable as error:
        problem = str(error)
    if problem:
        me.store.set("offer", json.dumps({"problem": f"rank 0: {problem}"}))
        raise Unavailable(f"rank 0: {problem}")
    with _listening() as (server, name):
        me.store.set("offer", json.dumps({"socket": name, "nonce": nonce, "sizes": _sizes_of(options)}))
        problem = _collect(me, server, fd)
    me.store.set("verdict", problem)
    if problem:
        os.close(fd)
        raise _refusal(problem)
    return fd


def _sizes_of(options: ShmOptions) -> dict[str, int]:
    """The options that must be equal on all ranks, because they decide the number of steps of a call."""
    return {name: getattr(options, name) for name in ("slice_bytes", "limit_bytes", "one_shot_bytes")}


def _differing(options: ShmOptions, sizes: dict[str, int]) -> str:
    mine = _sizes_of(options)
    return ", ".join(f"{name} {mine[name]}, rank 0 {sizes[name]}" for name in mine if mine[name] != sizes[name])


def _refusal(problem: str) -> Exception:
    """The error of a verdict."""
    return CommArgumentError(problem) if problem.startswith(_DIFFER) else Unavailable(problem)


def _sizes(fd: int) -> tuple[int, int]:
    """(size of the file, bytes to take at start)."""
    module = native.module()
    in_bytes, piece, size = module.layout(fd)
    return module.sizes(size, in_bytes, piece, MAILBOX)


def _collect(me: Member, server: socket.socket, fd: int) -> str:
    """Serve the others until all have answered; the problem of the first who has one, else ""."""
    waiting = set(range(1, me.size))
    until = time.monotonic() + me.patience.total_seconds()
    problem = ""
    while waiting:
        _hand_out(server, fd)
        for rank in sorted(waiting):
            if not me.store.check([f"answer/{rank}"]):
                break  # they come in any order, but asking costs a round trip
            waiting.remove(rank)
            problem = problem or me.store.get(f"answer/{rank}").decode()
        if time.monotonic() > until:
            raise CommError(f"making a group in shared memory: rank(s) {sorted(waiting)} did not come in {me.patience}")
    return problem


def _follow(me: Member, options: ShmOptions) -> int:
    me.store.wait(["offer"], me.patience)
    offer = json.loads(me.store.get("offer"))
    if "problem" in offer:
        raise Unavailable(offer["problem"])
    fd, problem = -1, native.reason()
    try:
        if not problem:
            fd = fetch(offer["socket"], me.patience.total_seconds())
            if native.module().probe(fd)[:2] != tuple(offer["nonce"]):
                raise Unavailable("the memory behind the socket is not the group's (wrong nonce)")
            hold_lock(fd, me.rank)
            reserve(fd, me.rank, me.size, _sizes(fd)[1])
    except Unavailable as error:
        problem = str(error)
    if differing := _differing(options, offer["sizes"]):
        problem = f"{_DIFFER}: rank {me.rank} has {differing}"
    elif problem:
        problem = f"rank {me.rank}: {problem}"
    me.store.set(f"answer/{me.rank}", problem)
    me.store.wait(["verdict"], me.patience)
    verdict = me.store.get("verdict").decode()
    if problem and not verdict:
        raise CommError(f"rank {me.rank} met the store of an earlier group ({problem}): use another port or file")
    if verdict:
        if fd >= 0:
            os.close(fd)
        raise _refusal(verdict)
    return fd


def serve(fd: int, peers: int, announce: Any, patience: float) -> None:
    """Announce a socket and hand `fd` to `peers` processes; gives up quietly after `patience` (they will report)."""
    with _listening() as (server, name):
        announce(name)
        until = time.monotonic() + patience
        while peers and time.monotonic() < until:
            peers -= _hand_out(server, fd)


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def world_size() -> int:
    """Ranks of the default group, 0 before it exists."""
    return dist.get_world_size() if dist.is_initialized() else 0
