"""The gloo group that does what shared memory does not: everything where it cannot serve, else what the transport has no kernel for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group that meets in `store` (collective).

    A store may outlive its groups (under torchrun it is the agent's), and gloo would take an earlier group's addresses for those of this one: each
    rank counts which group it is.
    """
    meeting = store.add(f"gloo/meetings/{rank}", 1)
    gloo: Any = dist.ProcessGroupGloo
    return gloo(PrefixStore(f"gloo/{meeting}/", store), rank, size, timeout=timeout)
