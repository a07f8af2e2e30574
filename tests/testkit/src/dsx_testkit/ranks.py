"""`run_ranks`: run one function on several forked ranks and bring back what each returned.

This is the side of the test process; `zygote.py` is the other. The function, its arguments and the test module they
come from travel by value (cloudpickle), because pytest's importlib mode makes test modules unimportable elsewhere.
"""

import atexit
import contextlib
import importlib.machinery
import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import pytest

from . import zygote as protocol


@dataclass(frozen=True)
class RankFailure:
    """What one rank left behind: `kind` is the exception's class name, or `died`, `stopped`, `timeout`."""

    rank: int
    kind: str
    text: str
    traceback: str
    output: str


class RankError(RuntimeError):
    """One or more ranks failed; `failures` is ordered, the first failure first, stopped ranks last."""

    def __init__(self, headline: str, failures: list[RankFailure]):
        self.failures = failures
        parts = [headline]
        for failure in failures:
            parts.append(f"\n--- rank {failure.rank}: {failure.kind}\n{failure.traceback.rstrip()}")
            if failure.output.strip():
                parts.append(f"    output of rank {failure.rank}:\n{failure.output.rstrip()[-4000:]}")
        super().__init__("\n".join(parts))


class RankTimeout(RankError):
    """Not all ranks finished in time; the failures hold the stacks of those that did not."""


class _Zygote:
    """The zygote of this process, started on first use and again when it is gone."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket | None = None
        self.owner = 0

    def ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        sock = self._connected()
        request["zygote"] = self.process.pid if self.process else 0
        try:
            sock.settimeout(patience)
            protocol.send(sock, request)
            return protocol.receive(sock)
        except BaseException:
            self.stop()  # takes the ranks with it; the next call starts another
            raise

    def _connected(self) -> socket.socket:
        if self.owner != os.getpid():  # a fork of the test process must not share the socket
            self.process = self.sock = None
        if self.process is None or self.process.poll() is not None or self.sock is None:
            self.stop()
            ours, theirs = socket.socketpair()
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [
                sys.executable,
                "-c",
                "from dsx_testkit.zygote import main; main()",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            with theirs:
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=environ
                )
            self.sock, self.owner = ours, os.getpid()
        return self.sock

    def stop(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        if self.sock is not None:
            self.sock.close()
        self.process = self.sock = None


_ZYGOTE = _Zygote()
atexit.register(_ZYGOTE.stop)


def stop_zygote() -> None:
    """End the warm process (the next `run_ranks` starts another)."""
    _ZYGOTE.stop()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 60.0,
    threads: int = 1,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` forked processes and return what each returned, by rank.

    The default process group is there (`backend=None`: only the environment variables RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT are). Generators are seeded with 0, torch uses `threads` threads, environment,
    directory and `sys.path` are those of the caller. What ranks print appears when the call ends.

    Raises:
        RankError: a rank raised or died. The others are stopped; every rank's traceback is in the message.
        RankTimeout: `timeout` seconds are over. The message holds every unfinished rank's stacks.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    folder = Path(tempfile.mkdtemp(prefix="dsx-ranks-"))
    try:
        with _by_value(_modules_of(fn, sys._getframe(1).f_globals.get("__name__", ""))):
            (folder / "call").write_bytes(_by_value_with_files((fn, args)))
        request = {
            "world_size": world_size,
            "folder": str(folder),
            "backend": backend,
            "timeout": timeout,
            "threads": threads,
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "environ": dict(os.environ),
            "preload": protocol.loaded_modules(),
        }
        reply = _ZYGOTE.ask(request, timeout + 60.0)
        return _collect(reply, folder, world_size, timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _modules_of(fn: Any, caller: str) -> list[ModuleType]:
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    names = {caller, getattr(fn, "__module__", None) or ""}
    return [sys.modules[n] for n in sorted(names) if n in sys.modules and n != "__main__" and not _importable(n)]


def _importable(name: str) -> bool:
    """True if another process with the same `sys.path` can import the module (a namespace folder does not count)."""
    top = name.partition(".")[0]
    if top in sys.builtin_module_names:
        return True
    spec = importlib.machinery.PathFinder.find_spec(top)
    if spec is None or spec.origin is None:
        return False
    return "." in name or spec.origin == getattr(sys.modules[name], "__file__", None)


@contextlib.contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    added = [m for m in modules if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    """Keeps the file that code stands in: from 3.1.3 on cloudpickle replaces it by "<dynamic-code>", and tracebacks and
    reports of a rank would no longer name the test.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            make, values, *_ = self.dispatch_table[CodeType](obj)
            return _code_of_file, (obj.co_filename, make, values)
        return super().reducer_override(obj)


def _code_of_file(filename: str, make: Callable[..., CodeType], values: tuple[Any, ...]) -> CodeType:
    return make(*values).replace(co_filename=filename)


def _by_value_with_files(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _collect(reply: dict[str, Any], folder: Path, world_size: int, timeout: float) -> list[Any]:
    outputs = [_text(folder / f"rank{rank}.out") for rank in range(world_size)]
    if not reply["pending"] and all(status == protocol.OK for _, status in reply["order"]):
        for output in outputs:
            sys.stdout.write(output)
        return [pickle.loads((folder / f"rank{rank}.result").read_bytes()) for rank in range(world_size)]
    failures: list[RankFailure] = []
    cause: BaseException | None = None
    for rank, status in reply["order"]:
        if status == protocol.FAILED:
            record = pickle.loads((folder / f"rank{rank}.error").read_bytes())
            failures.append(RankFailure(rank, record["kind"], record["text"], record["traceback"], outputs[rank]))
            if cause is None and record["pickled"]:
                cause = pickle.loads(record["pickled"])
        elif status == protocol.DIED:
            how = _how(reply["exit_codes"][rank])
            stacks = _text(folder / f"rank{rank}.stacks")
            failures.append(RankFailure(rank, "died", how, f"{how}\n{stacks}", outputs[rank]))
    if failures and failures[0].kind == "Skipped":
        pytest.skip(failures[0].text)
    kind = "timeout" if reply["timed_out"] else "stopped"
    for rank in reply["pending"]:
        stacks = _text(folder / f"rank{rank}.stacks") or "(no stack: it did not react)"
        failures.append(RankFailure(rank, kind, f"was {kind}", stacks, outputs[rank]))
    if reply["timed_out"]:
        ranks = ", ".join(map(str, reply["pending"]))
        raise RankTimeout(f"rank(s) {ranks} of {world_size} not finished after {timeout:g} s", failures)
    first = failures[0]
    raise RankError(f"rank {first.rank} of {world_size} failed first: {first.kind}: {first.text}", failures) from cause


def _how(code: int) -> str:
    if code >= 0:
        return f"the process ended by itself with exit code {code}"
    return f"the process was ended by signal {signal.Signals(-code).name}"


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
