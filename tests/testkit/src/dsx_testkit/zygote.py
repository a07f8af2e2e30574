"""The warm process that test ranks are forked from, and what a rank does after the fork.

Starting Python with torch takes seconds; forking a process that has torch loaded takes milliseconds. But a process in
which a multi-threaded region has run must not be forked (the child waits for threads it does not have), and a pytest
process has run many. So this module runs as a process of its own (`main`): it imports torch
and friends, never computes anything, and forks ranks on request. It is single-threaded and says so with every reply.

Modules of dsx that a rank imported are imported here before the next fork: the names of `dsx` load when they are used,
so that otherwise the ranks of every test would spend a second on the same imports.

Requests and replies are pickled dicts with a length prefix on a Unix socket. Results, tracebacks, stacks and output of
the ranks lie in the directory of the call (see `ranks.py`, the other end). Ends itself when the socket closes or its
parent dies. Linux only for the death signal; elsewhere the closed socket has to do.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

OK, FAILED, DIED = b"k", b"f", b""
GRACE = 1.0  # seconds for the other ranks to report after the first failure
STACKS = 0.3  # seconds to write stacks before the kill


def send(sock: socket.socket, message: Any) -> None:
    """Send one pickled message with its length in front."""
    data = pickle.dumps(message)
    sock.sendall(struct.pack("<Q", len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Receive one message of `send`; EOFError when the other end is gone."""
    (size,) = struct.unpack("<Q", _exactly(sock, 8))
    return pickle.loads(_exactly(sock, size))


def _exactly(sock: socket.socket, size: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = sock.recv(size - len(chunks))
        if not chunk:
            raise EOFError("the other end of the socket is closed")
        chunks += chunk
    return bytes(chunks)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


def loaded_modules() -> list[str]:
    """The modules of dsx that this process has loaded. Without compiled ones: their threads must begin in the rank."""
    return sorted(n for n in sys.modules if n.startswith("dsx") and n.rpartition(".")[2] not in ("_C", "__main__"))


def serve(sock: socket.socket) -> None:
    """Answer requests until the socket closes."""
    used: set[str] = set()  # modules that ranks imported
    while True:
        try:
            request = receive(sock)
        except (EOFError, ConnectionError):
            return
        request["preload"] = sorted(used.union(request["preload"]))
        reply = _run(request)
        for file in Path(request["folder"]).glob("rank*.modules"):
            used.update(file.read_text().split())
        send(sock, reply)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    for name in request["preload"]:
        # a module that does not import here fails, with its traceback, in the rank that uses it
        with contextlib.suppress(Exception):
            __import__(name)
    gc.freeze()
    listener = _reserved_port()
    request["port"] = listener.getsockname()[1]
    if request["backend"] is not None:
        listener.listen(128)
    release_read, release_write = os.pipe()
    began = time.monotonic()
    statuses: dict[int, int] = {}  # read end of a rank's status pipe -> rank
    pids: list[int] = []
    for rank in range(request["world_size"]):
        status_read, status_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in (*statuses, status_read, release_write):
                os.close(fd)
            _rank_main(request, rank, listener, status_write, release_read)
        os.close(status_write)
        statuses[status_read] = rank
        pids.append(pid)
    if request["backend"] is not None:
        listener.close()  # rank 0 has it
    os.close(release_read)
    order, timed_out = _watch(statuses, began + request["timeout"])
    pending = [rank for rank in range(len(pids)) if rank not in {r for r, _ in order}]
    if pending:
        for rank in pending:
            _signal(pids[rank], signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(STACKS)
    os.close(release_write)
    codes = _reap(pids, kill_at_once=bool(pending))
    listener.close()
    return {
        "order": order,
        "timed_out": timed_out,
        "pending": pending,
        "exit_codes": codes,
        "threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
    }


def _reserved_port() -> socket.socket:
    """A socket that has a port and does not listen. While it is open, the kernel gives the port to nobody who asks for
    any port, and rank 0 can still listen on it: both sockets allow reuse.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _watch(statuses: dict[int, int], deadline: float) -> tuple[list[tuple[int, bytes]], bool]:
    """Collect one status per rank in the order of arrival, until all are in, a failure's grace is over, or time is
    up.
    """
    order: list[tuple[int, bytes]] = []
    timed_out = True
    with selectors.DefaultSelector() as selector:
        for fd in statuses:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(left):
                status = os.read(key.fd, 1)
                selector.unregister(key.fd)
                order.append((statuses[key.fd], status))
                if status != OK and timed_out:
                    timed_out, deadline = False, min(deadline, time.monotonic() + GRACE)
        else:
            timed_out = False
    for fd in statuses:
        os.close(fd)
    return order, timed_out


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap(pids: list[int], *, kill_at_once: bool) -> list[int]:
    """Wait for every rank (killed when asked, or after 5 s), then kill what it left in its process group."""
    until = time.monotonic() + (0.0 if kill_at_once else 5.0)
    codes: list[int] = []
    for pid in pids:
        done = 0
        while not done and time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                time.sleep(0.001)
        if not done:
            _signal(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # subprocesses of the rank
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def _rank_main(
    request: dict[str, Any], rank: int, listener: socket.socket, status_write: int, release_read: int
) -> None:
    """Body of a forked rank: never returns."""
    folder = Path(request["folder"])
    status = DIED
    try:
        os.setpgid(0, 0)
        die_with_parent(request["zygote"])
        out = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        stacks = open(folder / f"rank{rank}.stacks", "w")  # noqa: SIM115  (lives as long as the process)
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        status = _call(request, rank, listener, folder)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(status_write, status)
        # a rank that leaves takes the store and its connections with it: all leave together
        os.read(release_read, 1)
    finally:
        os._exit(0 if status == OK else 1)


def _call(request: dict[str, Any], rank: int, listener: socket.socket, folder: Path) -> bytes:
    import cloudpickle

    try:
        function, args = _prepare(request, rank, folder)
        _init_process_group(request, rank, listener)
        before = set(loaded_modules())
        result = cloudpickle.dumps(function(rank, request["world_size"], *args))
        if new := set(loaded_modules()) - before:
            (folder / f"rank{rank}.modules").write_text("\n".join(new))
    except BaseException as error:
        pickled = b""
        # not pytest's outcomes: they would travel by value, as another class
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):  # the text is enough
                data = cloudpickle.dumps(error)
                pickle.loads(data)
                pickled = data
        record = {"kind": type(error).__name__, "text": str(error), "traceback": _trace(error), "pickled": pickled}
        (folder / f"rank{rank}.error").write_bytes(pickle.dumps(record))
        return FAILED
    (folder / f"rank{rank}.result").write_bytes(result)
    return OK


def _trace(error: BaseException) -> str:
    """The traceback without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _prepare(request: dict[str, Any], rank: int, folder: Path) -> tuple[Any, tuple[Any, ...]]:
    import torch

    from .numerics import seed_all

    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(request["environ"])
    torch.set_num_threads(request["threads"])
    seed_all(0)
    return pickle.loads((folder / "call").read_bytes())


def _init_process_group(request: dict[str, Any], rank: int, listener: socket.socket) -> None:
    import torch.distributed as dist

    world_size, port = request["world_size"], request["port"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name
    if request["backend"] is None:
        return
    # the listening socket was bound before the fork: no race for the port
    fd = listener.detach()
    extra: dict[str, Any] = {"master_listen_fd": fd} if rank == 0 else {}
    if rank != 0:
        os.close(fd)
    patience = timedelta(seconds=request["timeout"])
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", port, world_size, rank == 0, patience, wait_for_workers=False, **extra
    )
    dist.init_process_group(request["backend"], store=store, rank=rank, world_size=world_size, timeout=patience)


def main() -> None:
    """Entry point; arguments: the socket's descriptor and the parent's process id."""
    die_with_parent(int(sys.argv[2]))
    sock = socket.socket(fileno=int(sys.argv[1]))
    import cloudpickle  # noqa: F401
    import pytest  # noqa: F401  (the asserts of test modules are rewritten by it)
    import torch._dynamo
    import torch.distributed  # noqa: F401

    serve(sock)
