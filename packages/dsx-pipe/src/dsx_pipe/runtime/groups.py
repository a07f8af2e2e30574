"""The process groups of one pipeline."""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch


class Groups:
    """The process groups of one pipeline, for headers and for payloads.

    Args:
        group: process group of the pipeline's ranks; None: all ranks.
        device: device of the tensors.
        batched: send payloads in batches; on a device they always are.

    Attributes:
        frames: whether small tensors travel behind the header.
    """

    def __init__(self, group: Any, device: torch.device, *, batched: bool = False) -> None:
        self.group, self.device = group, device
        self.ranks = dsx_comm.get_all_ranks_from_group(group)
        self.rank, self.size = dsx_comm.get_rank(group), dsx_comm.get_world_size(group)
        self.world_rank = self.ranks[self.rank]
        self.batched = batched or device.type != "cpu"
        # A rehearsal notes headers and payloads one by one, so its messages keep them apart.
        self.frames = not self.batched and dsx_comm.get_backend(group) in ("dsx", "gloo")
        self.host = self.payload = group
        if device.type != "cpu" and self.size > 1:
            # Several pipelines make theirs at the same time, so only this pipeline's ranks meet.
            self.host = dsx_comm.new_group(self.ranks, backend="gloo", description="pipeline headers", local=True)
            self.payload = dsx_comm.new_group(self.ranks, description="pipeline tensors", local=True)
