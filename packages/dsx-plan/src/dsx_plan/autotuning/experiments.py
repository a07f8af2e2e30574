"""One experiment: the user's script, started as always, with the configuration of a candidate; how it ended, and why.

The folder of an experiment holds all there is to know: `ds_config.json` (which also tells the engine to measure, see
`dsx_plan.section`; its secrets are masked), the command, its output, and `metrics.json` once the engine has
measured. Everything runs in fresh processes; one that takes too long is ended with all its ranks.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from dsx_monitor.secrets import without_secrets

from .arguments import with_config, with_mappings
from .files import CONFIG, METRICS, PRIVATE_CONFIG, STARTED, write_whole

__all__ = ["Job", "Outcome", "run_experiment", "stopping_cleanly"]

_END_S = 10.0
"""Seconds between the signal to end an experiment and killing it. An experiment has nothing to save."""

_NO_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|MemoryError|std::bad_alloc"
    r"|not enough memory",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Job:
    """The program that is tuned, and the functions that start it. Made by the launcher.

    Attributes:
        script, args: the user's program and its arguments.
        world_size: ranks of an experiment.
        start: starts it on these ranks for its arguments, its output going to two files; the process
            ends when this one does.
        run: runs it for its arguments on all ranks of the command line, as without a tuner; returns the exit code.
        shown: gives the command a user would type for these arguments, with secrets masked: it goes into files and
            the log.
        say: shows the user a line.
    """

    script: str
    args: tuple[str, ...]
    world_size: int
    start: Callable[[Sequence[str], IO[bytes], IO[bytes]], subprocess.Popen[bytes]]
    run: Callable[[Sequence[str]], int]
    shown: Callable[[Sequence[str]], str]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """The end of an experiment.

    Attributes:
        metrics: what the engine measured; None if it did not come to that.
        reason: why not, in one line; empty otherwise.
        out_of_memory: for want of memory.
        initialized: the script has built an engine with the experiment's configuration.
        seconds: from start to end.
    """

    metrics: Mapping[str, Any] | None
    reason: str = ""
    out_of_memory: bool = False
    initialized: bool = True
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for the journal."""
        metrics = None if self.metrics is None else dict(self.metrics)
        return {"metrics": metrics, "reason": self.reason, "out_of_memory": self.out_of_memory,
                "initialized": self.initialized, "seconds": self.seconds}  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of `to_json`; further keys are ignored."""
        return cls(data["metrics"], data["reason"], data["out_of_memory"], data["initialized"], data["seconds"])


def run_experiment(
    job: Job, folder: Path, document: Mapping[str, Any], mappings: Mapping[str, str], timeout: float
) -> Outcome:
    """Run the script once with a configuration and say how it ended.

    Args:
        job: how it is started.
        folder: the experiment's own; what an earlier attempt has left there is removed.
        document: the configuration, with the section that makes the engine measure.
        mappings: see `arg_mappings`.
        timeout: seconds after which it is ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (METRICS, STARTED):
        (folder / name).unlink(missing_ok=True)
    mapped, config = with_mappings(job.args, mappings, document), folder / CONFIG
    whole, shown = (json.dumps(one, indent=2) + "\n" for one in (document, without_secrets(document)))
    write_whole(config, shown)
    write_whole(folder / "command.txt", job.shown(with_config(mapped, str(config))) + "\n")
    if shown != whole:
        config = folder / PRIVATE_CONFIG
    began = time.monotonic()
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        try:
            if shown != whole:
                write_whole(config, whole, private=True)
            process = job.start(with_config(mapped, str(config)), out, err)
            code = _waited(process, timeout)
        finally:
            (folder / PRIVATE_CONFIG).unlink(missing_ok=True)
    return _judge(folder, code, timeout, time.monotonic() - began)


def _waited(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """Wait for a launcher. Returns its exit code, or None after `timeout` seconds; it is ended then, as on an error."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs, and with it its ranks."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _judge(folder: Path, code: int | None, timeout: float, seconds: float) -> Outcome:
    initialized = (folder / STARTED).exists()
    if (folder / METRICS).exists():  # written whole, so it can be read
        return Outcome(json.loads((folder / METRICS).read_text(encoding="utf-8")), seconds=seconds)
    if code is None:
        where = "after initialize" if initialized else "before it called initialize"
        return Outcome(
            None, f"no end within {timeout:.0f} s ({where}); ended", initialized=initialized, seconds=seconds
        )
    said = _end_of(folder / "stderr.log") + _end_of(folder / "stdout.log")
    if code and (code in (-signal.SIGKILL, 128 + signal.SIGKILL) or _NO_MEMORY.search(said)):
        return Outcome(None, "out of memory", True, initialized, seconds)
    if code:
        return Outcome(None, f"exit code {code}: {_cause(said)}", initialized=initialized, seconds=seconds)
    if not initialized:
        return Outcome(None, "it ended without calling dsx.initialize with the configuration it was given",
                       initialized=False, seconds=seconds)  # fmt: skip
    return Outcome(None, "it ended before update autotuning.end_profile_step; let it train longer", seconds=seconds)


def _end_of(path: Path, size: int = 20_000) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - size))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _cause(text: str) -> str:
    """The line that says why: the launcher's report of the first failure, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reports = [line for line in lines if re.search(r"\brank \d+\]? failed on ", line)]
    line = reports[0] if reports else lines[-1] if lines else "it said nothing"
    return line if len(line) <= 300 else line[:280] + " ..."


@contextmanager
def stopping_cleanly() -> Iterator[None]:
    """SIGTERM inside ends the running experiment as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
