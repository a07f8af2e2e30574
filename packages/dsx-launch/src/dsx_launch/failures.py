"""Records of failed ranks: which failure came first, and how it is shown.

When one rank raises, the other ranks soon fail too, because their peer is gone. The cause is the earliest failure that
is not such a broken connection. These are pure functions over records. The ranks write the records (see
``_worker.py``); the agent writes them for ranks that died without reporting an exception.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

# Errors of any transport about a dead peer are consequences. The errors of dsx-comm belong here too: they are raised
# at once, often before the agent has seen the dead process (test_launch_first_cause.py).
_PEER_GONE = re.compile(
    r"^(PeerLostError|CommAbortedError|CollectiveTimeoutError|HangError)\b|"
    r"connection (closed|reset|refused|was (reset|closed))|broken pipe|remote process exited|peer closed|socket timeout"
    r"|failed to recv, got 0 bytes|connectFullMesh|DistBackendError|DistNetworkError|gloo.*(timed out|timeout)|watchdog"
    r" caught",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankFailure:
    """One failed rank. ``exitcode`` is that of `subprocess` (negative: a signal); ``time`` is in seconds since the
    epoch.
    """

    rank: int
    host: str
    time: float
    exitcode: int
    pid: int = 0
    type: str = ""
    message: str = ""
    traceback: str = ""

    @property
    def follows_another(self) -> bool:
        """Whether this looks like the consequence of a peer that is gone."""
        return bool(self.type) and bool(_PEER_GONE.search(f"{self.type}: {self.message}"))

    @property
    def order(self) -> tuple[bool, float, int]:
        """The smallest is the one to show: causes before consequences, then the earliest, then the lowest rank."""
        return self.follows_another, self.time, self.rank

    @property
    def reason(self) -> str:
        """One line: the exception, the signal or the exit code."""
        if self.type:
            return f"{self.type}: {self.message}".strip().splitlines()[0]
        if self.exitcode < 0:
            return f"killed by {signal_name(-self.exitcode)}"
        return f"exited with code {self.exitcode}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 200`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(returncode: int) -> int:
    """A `subprocess` return code as an exit code of a shell: death by signal n becomes 128 + n, which is never 0."""
    return 128 - returncode if returncode < 0 else returncode & 0xFF or (1 if returncode else 0)


def first_cause(failures: Iterable[RankFailure]) -> RankFailure | None:
    """The failure to show; None if there is none."""
    return min(failures, key=lambda failure: failure.order, default=None)


def read_records(folder: Path, *, host: str) -> list[RankFailure]:
    """The exceptions that the ranks of this host wrote into ``folder``. Their exit code is Python's, 1, however the
    process ended afterwards.
    """
    found = []
    for path in sorted(folder.glob("rank*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        data.pop("local_rank", None)
        found.append(RankFailure(host=host, exitcode=1, **data))
    return found


def to_json(failure: RankFailure) -> str:
    return json.dumps(asdict(failure))


def from_json(text: str) -> RankFailure:
    return RankFailure(**json.loads(text))


def render(cause: RankFailure, others: Iterable[RankFailure]) -> str:
    """The report: the cause's traceback with its rank before every line, then one line for each other failed rank."""
    lines = [f"[rank {cause.rank}] {line}" for line in cause.traceback.rstrip().splitlines()]
    what = f"failed on {cause.host}" + (f" (pid {cause.pid})" if cause.pid else "") + f": {cause.reason}"
    lines.append(f"[rank {cause.rank}] {what}" if not cause.traceback else f"[dsx] rank {cause.rank} {what}")
    others = sorted(others, key=lambda failure: failure.rank)
    same = [str(other.rank) for other in others if (other.type, other.message) == (cause.type, cause.message)]
    if same:
        lines.append(f"[dsx] the same on rank {', '.join(same)}")
    lines += [
        f"[dsx] rank {other.rank} failed after it: {other.reason}" for other in others if str(other.rank) not in same
    ]
    return "\n".join(lines) + "\n"
