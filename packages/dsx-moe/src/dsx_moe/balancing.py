"""Balances the experts without a loss: once per optimizer step it updates a bias for the choice of experts.

Every router with `bias_update_rate` u has a bias b[e] per expert. It is added to the scores only for the choice of
experts. c[e] counts the requests for expert e since the last update, over all data-parallel ranks and micro-batches:

    b[e] += u * sign(mean(c) - c[e])

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). Activation checkpointing runs forwards twice and so doubles every
count, which does not change the sign.
"""

from __future__ import annotations

import dsx_comm
import torch
from torch import nn

from .gate import TopKGate
from .groups import data_ranks


def update_router_bias(model: nn.Module) -> int:
    """Update the biases of all routers of a model, with one all-reduce (collective over the data-parallel ranks).

    Call it once per optimizer step, on every rank.

    Returns:
        The number of routers that have a bias.
    """
    gates = [m for m in model.modules() if isinstance(m, TopKGate) and m.expert_bias is not None]
    if not gates:
        return 0
    with torch.no_grad():
        counts = torch.cat([gate.assigned for gate in gates if gate.assigned is not None])
        if dsx_comm.is_initialized():
            where = data_ranks(model)
            if where.size > 1:
                dsx_comm.all_reduce(counts, group=where.group)
        for gate, requests in zip(gates, counts.split([gate.num_experts for gate in gates])):
            if gate.expert_bias is not None and gate.assigned is not None:
                gate.expert_bias += gate.bias_update_rate * torch.sign(requests.mean() - requests)
                gate.assigned.zero_()
    return len(gates)
