"""Keys for one group in a store that outlives its groups.

Under torchrun the store belongs to the agent: a group that is made again under the same name would find the keys of the
last one. Every rank counts for itself how often it has asked for `name`. All ranks of a group make groups in the same
order, so that they get the same number.
"""

from __future__ import annotations

from typing import Any


def fresh_prefix(store: Any, name: str, rank: int) -> str:
    """Prefix `name/number/` for the keys of a new group, the same on all its ranks; each call counts on. No
    communication but with the store.
    """
    return f"{name}/{store.add(f'{name}/meetings/{rank}', 1)}/"
