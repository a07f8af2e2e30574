"""The output of the ranks of a host on its way to the terminal: prefixes that name the rank, and a limit on lines.

Without such an option the ranks write to the terminal themselves. With one they write into pipes, which a thread of
their agent reads. It shows whole lines that begin with the rank, no more of a rank in a second than asked for, and
keeps a copy in the rank's log file. A carriage return ends a line too, so that progress bars can be read.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import ResourceError
from .options import LaunchOptions

__all__ = ["SHOW_ALL", "Output", "RankOutput", "output_of"]

STREAMS = ("stdout", "stderr")
_LONGEST = 1 << 16  # bytes; longer lines are shown in pieces
_LOOK_S = 0.2


@dataclass(frozen=True)
class Output:
    """Options for the ranks' output.

    Attributes:
        local_ranks: those of each host of which something is shown; None: all.
        prefix: whether lines begin with the rank.
        most: lines of a rank in a second; 0: all.
        tee: streams that are shown of ranks with a log file: 1 stdout, 2 stderr, 3 both.
    """

    local_ranks: tuple[int, ...] | None = None
    prefix: bool = False
    most: int = 0
    tee: int = 0

    @property
    def piped(self) -> bool:
        """Whether the ranks' lines go through their agent."""
        return self.prefix or bool(self.most) or bool(self.tee)

    def to_text(self) -> str:
        """The text for the command line of `dsx_launch.node`; empty if all is default."""
        if self == SHOW_ALL:
            return ""
        ranks = "all" if self.local_ranks is None else ",".join(map(str, self.local_ranks))
        return f"{ranks}:{int(self.prefix)}:{self.most}:{self.tee}"

    @staticmethod
    def from_text(text: str) -> Output:
        """The object whose `to_text` gave this text."""
        if not text:
            return SHOW_ALL
        ranks, *numbers = text.split(":")
        prefix, most, tee = map(int, numbers)
        chosen = None if ranks == "all" else tuple(map(int, ranks.split(",")))
        return Output(chosen, bool(prefix), most, tee)


def output_of(options: LaunchOptions, procs: int) -> Output:
    """The output options of a launch, for hosts with at most ``procs`` ranks each.

    Raises:
        ResourceError: no host has such a local rank.
    """
    ranks = options.shown_ranks
    if ranks is not None and max(ranks) >= procs:
        raise ResourceError(
            f"--local_ranks_filter {options.local_ranks_filter}: got local rank {max(ranks)}, expected numbers from 0"
            f" to {procs - 1}, because no host has more than {procs} rank(s)"
        )
    return Output(ranks, options.prefix_output, options.max_output_lines or 0, options.tee or 0)


SHOW_ALL = Output()
"""The ranks write to the terminal themselves."""


class _Stream:
    """One pipe: its bytes, cut into lines."""

    def __init__(self, path: Path, local_rank: int, number: int) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Open for writing too: the pipe has no end when a rank has ended, and a rank that opens it does not wait.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.local_rank, self.number = local_rank, number
        self._rest, self._after_return = b"", False

    def read(self) -> bytes:
        """The bytes that are ready now; empty if there are none."""
        try:
            return os.read(self.descriptor, _LONGEST)
        except BlockingIOError:
            return b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends."""
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r") or (self._after_return and not data)
        *found, self._rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        while len(self._rest) > _LONGEST:
            found.append(self._rest[:_LONGEST])
            self._rest = self._rest[_LONGEST:]
        return found

    def last(self) -> list[bytes]:
        """The line that nobody has ended."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class _Rank:
    """Counts the lines of one rank, and writes its log file."""

    def __init__(self, rank: int, log: Path | None) -> None:
        self.prefix = f"[rank {rank}] ".encode()
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.second, self.shown, self.left_out = 0.0, 0, 0

    def keep(self, data: bytes) -> None:
        if self._log is not None:
            _write(self._log, data)

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)


class RankOutput:
    """Shows what the ranks of one host print.

    Args:
        output: what is shown.
        folder: for the pipes.
        log_dir: the folder of the ranks' log files; empty: none.
        to: the descriptors to which lines of stdout and stderr go.
        clock: for tests.
    """

    def __init__(
        self,
        output: Output,
        folder: Path,
        log_dir: str = "",
        to: tuple[int, int] = (1, 2),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.output, self.folder, self._log_dir, self._to, self._clock = output, folder, log_dir, to, clock
        self._streams: list[_Stream] = []
        self._ranks: dict[int, _Rank] = {}
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def begin(self, ranks: Mapping[int, int]) -> None:
        """Make the pipes of ranks that will be started.

        Args:
            ranks: local rank -> rank in the job.
        """
        self.close()
        chosen = self.output.local_ranks
        shown = {local: rank for local, rank in ranks.items() if chosen is None or local in chosen}
        if not shown or not self.output.piped:
            return
        logs = Path(self._log_dir) if self._log_dir else None
        for local, rank in shown.items():
            self._ranks[local] = _Rank(rank, None if logs is None else logs / f"rank{rank}.log")
            self._streams += [_Stream(self.folder / f"{local}.{name}", local, n) for n, name in enumerate(STREAMS)]
        self._closing.clear()
        self._thread = threading.Thread(target=self._follow, name="dsx-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the rest of what ranks have printed that have ended."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join()
        self._thread = None
        for stream in self._streams:
            while data := stream.read():
                self._take(stream, data)
            self._show(stream, stream.last())
            os.close(stream.descriptor)
        for rank in self._ranks.values():
            self._tell_left_out(rank)
            rank.close()
        self._streams, self._ranks = [], {}

    def _follow(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream in self._streams:
                selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            while not self._closing.is_set():
                for key, _ in selector.select(_LOOK_S):
                    self._take(key.data, key.data.read())
                for rank in self._ranks.values():
                    if self._clock() - rank.second >= 1:
                        self._tell_left_out(rank)

    def _take(self, stream: _Stream, data: bytes) -> None:
        self._ranks[stream.local_rank].keep(data)
        self._show(stream, stream.lines(data))

    def _show(self, stream: _Stream, lines: list[bytes]) -> None:
        if self.output.tee and not self.output.tee & (1 << stream.number):
            return
        rank, most = self._ranks[stream.local_rank], self.output.most
        if most and self._clock() - rank.second >= 1:
            self._tell_left_out(rank)
            rank.second, rank.shown = self._clock(), 0
        room = len(lines) if not most else max(0, most - rank.shown)
        rank.shown += min(room, len(lines))
        rank.left_out += max(0, len(lines) - room)
        text = b"".join(rank.prefix + line + b"\n" for line in lines[:room])
        if text:
            _write(self._to[stream.number], text)

    def _tell_left_out(self, rank: _Rank) -> None:
        count, rank.left_out = rank.left_out, 0
        if count:
            said = f"... {count} lines left out (--max_output_lines {self.output.most})\n".encode()
            _write(self._to[1], rank.prefix + said)


def _write(descriptor: int, data: bytes) -> None:
    """Write all, or nothing more where nobody reads any longer: the ranks go on."""
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # a terminal that another program has set so
                select.select([], [descriptor], [])
