"""Notes between the ranks of a host and their agent: small files in a folder that the agent makes and removes,
and variables.

The agent of `dsx launch --elastic_training` names the folder in the environment; under torchrun there is none. Both
sides do without a note that is not there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dsx_core import replace_text

__all__ = [
    "AGENT_VARIABLE", "BUILT", "JOINED", "LOADED", "MEMORY", "MIN_TIME", "PROGRESS", "RESTARTING", "UPDATED",
    "read_note", "tell_agent",
]  # fmt: skip

AGENT_VARIABLE = "DSX_ELASTIC_AGENT"
RESTARTING = "restarting"
"""From the agent: it only starts its ranks again, so that a snapshot in memory is enough. Its being there counts."""
PROGRESS = "progress"
"""From the ranks: number of the update of the newest snapshot."""
MIN_TIME = "min_time"
"""From the ranks: seconds between two changes of the number of hosts."""
MEMORY = "memory"
"""From the ranks: the folder of this host's snapshots."""
JOINED, BUILT, LOADED, UPDATED = "joined", "built", "loaded", "updated"
"""From the ranks: seconds since the epoch at which `join`, `dsx.initialize`, the load and the first update were over; a
detail may follow behind a space.
"""


def tell_agent(name: str, text: str) -> None:
    """Leave a note for the agent, if there is one. One rank of a host speaks for it."""
    folder = os.environ.get(AGENT_VARIABLE)
    if not folder:
        return
    path = Path(folder) / name
    with suppress(OSError):  # an agent that cannot be told counts restarts and waits less well, no more
        replace_text(path, text, durable=False)  # the agent never reads half a note


def read_note(folder: Path | None, name: str) -> str:
    """The text of a note that the ranks have written; empty if there is none."""
    if folder is None:
        return ""
    try:
        return (folder / name).read_text()
    except OSError:
        return ""
