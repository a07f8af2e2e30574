"""A process that has loaded what ranks load, and forks ranks from itself: they start in a moment instead of seconds.

Run by path by the launcher of an elastic job (``python -u .../_stand_by.py train.py args``). It imports torch and what
installed packages name (entry points of the group `dsx_launch.warm`), tells whether it may be forked, and forks a rank
per request. It never computes anything, and runs nothing of the user's. What is decided at an import is what a fresh
rank would decide: environment, path and number of threads are those of the ranks. A forked rank runs `_worker.py` as a
fresh one does.

May be forked: only a process of one thread. Some libraries start threads when they are imported (OpenBLAS) and end them
at a fork by themselves; so a first child is forked that ends at once, and threads are counted after that.

A rank's parent is the launcher, which watches it by its process id: the child that forks it ends at once, and the
launcher adopts what its descendants leave behind (`processes.adopt_orphans`).

Protocol: one JSON object per line on a socket. From here: ``{"seconds", "problem"}`` once; then, per request ``{"argv",
"env"}``, ``{"pid"}`` or ``{"problem"}``. Ends when the socket closes. Left out: the other end (`stand_by.py`).
"""

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import time
import types
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_worker.py")
SETTINGS_VARIABLE = "DSX_STAND_BY"
IMPORTS = (
    "torch.distributed",
    "torch._dynamo",  # the first optimizer imports it
    "torch.utils.data",
)
"""What ranks that train import sooner or later."""
WARM = "dsx_launch.warm"
"""Group of entry points: modules that are loaded too. An installed package names here what its ranks import."""


def main() -> None:
    settings = json.loads(os.environ.pop(SETTINGS_VARIABLE))
    worker = types.ModuleType("dsx_worker")
    worker.__file__ = WORKER
    SourceFileLoader("dsx_worker", WORKER).exec_module(worker)  # removes this folder from the path, too
    worker.die_with_parent(settings["agent_pid"])
    threads = worker.threads_of_a_rank(settings["cores"], settings["procs"])
    if threads:
        os.environ["OMP_NUM_THREADS"] = threads
    began = time.monotonic()
    load(worker, settings["kind"], sys.argv[1])
    sock = socket.socket(fileno=settings["socket"])
    said = sock.makefile("rw", encoding="ascii")
    answer(said, seconds=time.monotonic() - began, problem=why_not_forked())
    request = serve(said)
    if request is None:
        return
    said.close()
    sock.close()
    begin_rank(worker, request)


def load(worker, kind: str, target: str) -> None:
    """Import what ranks import, found where a rank of this program would find it."""
    before = list(sys.path)
    worker.add_to_path(os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target)))
    for name in IMPORTS:
        with contextlib.suppress(Exception):  # what cannot be imported fails in the rank, with its traceback
            importlib.import_module(name)
    for one in entry_points(group=WARM):
        with contextlib.suppress(Exception):
            one.load()
    sys.path[:] = before
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, the memory that ranks share


def why_not_forked() -> str:
    """Why this process must not be forked; empty if it may be."""
    first = os.fork()
    if first == 0:
        os._exit(0)
    os.waitpid(first, 0)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} thread(s) run in a process that has only imported torch and what ranks need"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return "a CUDA device is in use after the imports" if cuda is not None and cuda.is_initialized() else ""


def answer(said, **what: object) -> None:
    said.write(json.dumps(what) + "\n")
    said.flush()


def serve(said) -> dict | None:
    """Fork ranks until the launcher closes the socket. Returns None then, and in each rank its request."""
    while line := said.readline():
        request = json.loads(line)
        try:
            is_rank = fork_rank(said)
        except OSError as error:
            answer(said, problem=f"cannot fork: {error.strerror}")
            continue
        if is_rank:
            return request
    return None


def fork_rank(said) -> bool:
    """Fork a rank that the launcher adopts. Returns True in the rank, once the launcher has heard of it."""
    told, tell = os.pipe()
    gate, opens = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            rank = os.fork() == 0
        except OSError:
            os._exit(1)
        if not rank:
            os._exit(0)
        os.setsid()  # before anybody knows of this process: the launcher signals its group
        for fd in (told, opens):
            os.close(fd)
        os.write(tell, b"%d" % os.getpid())
        os.close(tell)
        if not os.read(gate, 1):  # the launcher has not heard of this rank, and never will
            os._exit(1)
        os.close(gate)
        return True
    for fd in (tell, gate):
        os.close(fd)
    os.waitpid(between, 0)  # from here on the launcher is the rank's parent
    pid = os.read(told, 32)
    os.close(told)
    if pid:
        answer(said, pid=int(pid))
        os.write(opens, b"g")
    else:
        answer(said, problem="cannot fork: too many processes, or too little memory")
    os.close(opens)
    return False


def begin_rank(worker, request: dict) -> None:
    """Become the rank: state that a fresh process makes for itself is made again."""
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    # A fresh process draws its own seeds, as Python's generator does at a fork. CUDA has the same in every process.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    worker.main(loaded=True)


if __name__ == "__main__":
    main()
