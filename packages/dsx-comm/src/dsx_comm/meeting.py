"""Keys that are a group's own in a store that outlives its groups.

Under torchrun the store is the agent's: a group that is made again under the same name finds there what the last one
left. Every rank counts for itself how often it came to `name`; as groups are made by all their ranks in the same order,
all arrive at the same number.
"""

from __future__ import annotations

from typing import Any


def fresh_prefix(store: Any, name: str, rank: int) -> str:
    """Prefix `name/number/` for the keys of a new group, the same on all its ranks; each call counts on. No
    communication but with the store.
    """
    return f"{name}/{store.add(f'{name}/meetings/{rank}', 1)}/"
