"""The numbers of an elastic job: how many hosts, and how long things may take. Data only."""

from __future__ import annotations

from dataclasses import dataclass

MIN_NODES_VARIABLE = "DSX_ELASTIC_MIN_NODES"
LAST_CALL_S = 2  # hosts that come so long after the least number is there belong to the same round
KEEP_ALIVE_TIMES = 4  # a host is lost that has not been heard of for so many times `Elastic.keep_alive_s`
KEEP_ALIVES_PER_S = 100  # of all hosts together; with each a host reads the state of all
STOP_AFTER_LOSS_S = 1  # from SIGTERM to SIGKILL when a rank is lost: without it the others cannot save, and only wait
JOIN_S = 600  # a job waits so long for its least number of hosts
CLOSE_S = 10
STORE_S = 60  # a store that does not answer for so long is lost
DEFAULT_RESTARTS = 3


@dataclass(frozen=True)
class Elastic:
    """Bounds on the hosts of a job, and on the number of failures in a row without progress.

    Attributes:
        min_nodes, max_nodes: bounds of the number of hosts.
        restarts: failures in a row, without a snapshot in between, after which the job is given up.
    """

    min_nodes: int
    max_nodes: int
    restarts: int

    @property
    def keep_alive_s(self) -> int:
        """Seconds between two signs of life of a host; it grows with the number of hosts, and is the same on all."""
        return max(1, -(-self.max_nodes // KEEP_ALIVES_PER_S))

    def to_text(self) -> str:
        """The text for the command line of `dsx_launch.node`."""
        return f"{self.min_nodes}:{self.max_nodes}:{self.restarts}"

    @staticmethod
    def from_text(text: str) -> Elastic:
        """The object whose `to_text` gave this text."""
        low, high, restarts = map(int, text.split(":"))
        return Elastic(low, high, restarts)
