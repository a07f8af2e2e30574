"""The gloo group for what the shared-memory transport cannot do: all operations where the ranks share no memory, else
those that the transport has no kernel for.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ..meeting import fresh_prefix


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group that meets in `store` (collective). gloo would take an earlier group's addresses for those of this
    one.
    """
    gloo: Any = dist.ProcessGroupGloo
    return gloo(PrefixStore(fresh_prefix(store, "gloo", rank), store), rank, size, timeout=timeout)
