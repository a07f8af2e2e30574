"""What the ranks of a host and their agent tell each other: small files in a folder that the agent makes and removes.

The agent of `dsx launch --elastic_training` names the folder in the environment; under torchrun there is none. Both
sides do without a note that is not there.
"""

from __future__ import annotations

__all__ = ["AGENT_VARIABLE", "MEMORY", "MIN_TIME", "PROGRESS", "RESTARTING"]

AGENT_VARIABLE = "DSX_ELASTIC_AGENT"
RESTARTING = "restarting"
"""From the agent: it only starts its ranks anew, so that a snapshot in memory is enough. Its being there counts."""
PROGRESS = "progress"
"""From the ranks: number of the update of the newest snapshot."""
MIN_TIME = "min_time"
"""From the ranks: seconds between two changes of the number of hosts."""
MEMORY = "memory"
"""From the ranks: the folder of this host's snapshots."""
