"""`MoE`: a mixture-of-experts layer for any model, on one rank or with its experts divided among many.

    layer = MoE(hidden_size=512, expert=FeedForward(512, 2048), num_experts=8, ep_size=4, k=2)
    output, l_aux, exp_counts = layer(hidden_states)
    loss = task_loss + 0.01 * l_aux

The arguments are DeepSpeed's. A layer knows its ranks when it is built, so that each rank makes only its own experts.
The formulas are in `gating`, the transfer of the tokens in `dispatch`. Left out: averaging of gradients (`gradients`,
or an engine, which reads the marks of the parameters), and the task loss, to which the user adds `l_aux`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import dsx_comm
import torch
import torch.nn.functional as F
from dsx_comm import parallel_groups
from dsx_core import with_code
from torch import nn

from .dispatch import LocalExperts, counts_and_flag, exchange_counts, run_exchanged, run_local
from .errors import MoEConfigError, RoutingError
from .exchange import Exchange
from .experts import Experts, PackedExperts
from .gate import TopKGate
from .gating import DropPolicy
from .groups import ExpertGroups, expert_groups_of, make_exchange
from .routing import Routing
from .stats import LayerStats, stats_of
from .tensor_parallel import GatheredExperts, copy_to_group, own_share, sum_over_group
from .wrappers import refuse_wrappers


class MoEOutput(NamedTuple):
    """The output of a layer.

    Attributes:
        output: the output, with the shape and dtype of the input.
        l_aux: 0-D, the balancing loss (with the z-loss).
        exp_counts: int64 [E], number of requests for each expert before dropping.
    """

    output: torch.Tensor
    l_aux: torch.Tensor
    exp_counts: torch.Tensor


class ExpertDispatch:
    """Sends routed tokens to the experts of a layer and combines what comes back.

    Args:
        groups: the expert-parallel layout.
        chunks: number of parts in which rows are sent; the transfer of one part overlaps with the experts' work on
            another.
        devices_per_node: number of ranks per node; rows are then sent in two hops. None: they are sent directly.
        tensor_group: process group of ranks that hold the same tokens; None: no such group.

    Raises:
        MoEConfigError: `chunks` is below 1, or `devices_per_node` does not divide the expert group.
    """

    def __init__(
        self,
        groups: ExpertGroups,
        chunks: int = 1,
        devices_per_node: int | None = None,
        tensor_group: Any = None,
    ) -> None:
        if chunks < 1:
            raise MoEConfigError(f"overlap_chunks: got {chunks}, expected at least 1")
        self.groups, self.chunks, self.tensor_group = groups, chunks, tensor_group
        self.exchange: Exchange | None = make_exchange(groups, devices_per_node)

    def __deepcopy__(self, memo: Any) -> ExpertDispatch:
        return self  # its groups cannot be copied, and it has no other state

    def __reduce__(self) -> Any:
        if self.exchange is not None or self.tensor_group is not None:
            raise MoEConfigError(
                "a layer whose experts are on several ranks cannot be pickled; save its state_dict() instead"
            )
        return ExpertDispatch, (self.groups, self.chunks)

    def __call__(
        self,
        tokens: torch.Tensor,
        routing: Routing,
        experts: LocalExperts,
        bad: torch.Tensor,
        name: str,
        during_transfer: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """tokens [T, h] -> [T, h]; collective if the experts are on several ranks.

        Args:
            tokens: [T, h].
            routing: the routes of these tokens.
            experts: this rank's experts.
            bad: 0-D bool, whether this rank's logits are not finite.
            name: name of the layer, for errors.
            during_transfer: called once, while rows are sent if there is a transfer, for work that does not need them.

        Raises:
            RoutingError: logits are not finite, here or on another rank of the group.
        """
        group = self.tensor_group
        if group is not None:
            tokens = copy_to_group(tokens, group)
            routing = routing.cut(int(routing.counts.sum())) if routing.uncut else routing
            routing = own_share(replace(routing, weight=copy_to_group(routing.weight, group)), group)
            experts = GatheredExperts(experts, group)
        if self.exchange is None:
            counts, is_bad = counts_and_flag(routing, bad)
            if is_bad:
                raise _not_finite(name, [dsx_comm.get_rank() if dsx_comm.is_initialized() else 0])
            if during_transfer is not None:
                during_transfer()
            out = run_local(tokens, routing.cut(sum(counts)), experts, counts)
        else:
            report = exchange_counts(tokens, routing, bad, self.exchange)
            if report.bad_ranks:
                raise _not_finite(name, [self.groups.expert.ranks[place] for place in report.bad_ranks])
            routing = routing.cut(report.routes_of(self.exchange.rank))
            out = run_exchanged(tokens, routing, experts, self.exchange, report, self.chunks, during_transfer)
        return out if group is None else sum_over_group(out, group)


class MoE(nn.Module):
    """A layer of experts. Each token uses k of them.

    Args:
        hidden_size: h, the size of a token.
        expert: a module from [n, h] to [n, h], which is copied for each expert; or a function that builds expert i; or
            `PackedExperts` with all experts.
        num_experts: number of experts of all ranks together; a multiple of `ep_size`.
        ep_size: number of ranks among which the experts are divided.
        k: number of experts per token.
        capacity_factor, eval_capacity_factor, min_capacity: see `dsx_moe.gating`.
        use_residual: add a dense copy of the expert with learned weights (Residual-MoE, arXiv 2201.05596).
        noisy_gate_policy: None, "Jitter" or "RSample".
        drop_tokens: drop tokens above the capacity; False: every token reaches its experts.
        use_rts: random token selection if an expert is over capacity (k = 1).
        use_tutel: accepted without effect; a warning says so.
        enable_expert_tensor_parallelism: the experts are slices over `tensor_group`.
        top2_2nd_expert_sampling: draw the second expert (k = 2).
        drop_policy, z_loss_weight, bias_update_rate: see `TopKGate`.
        overlap_chunks: number of parts in which tokens are sent; the transfer of one part overlaps with the experts'
            work on another.
        devices_per_node: number of ranks per node; the all-to-all then takes two hops. None: it is direct.
        tensor_group: process group of ranks that hold the same activations; None: the model axis of the topology, if it
            has several ranks.
        use_data_before_expert_parallel: neighbouring ranks hold the same experts instead of different ones.
        name: name of the layer, for errors and events; `name_layers` sets it for all layers of a model.

    Attributes:
        gate: the `TopKGate`.
        experts: this rank's experts.
        mlp, coefficient: with `use_residual`, the dense expert and the linear map that gives the weights of both parts.
        stats: statistics of the last forward; None before the first one.

    Raises:
        MoEConfigError: arguments do not fit each other, or `ep_size` is above 1 without a process group.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | Callable[[int], nn.Module],
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        drop_policy: DropPolicy = "probs",
        z_loss_weight: float = 0.0,
        bias_update_rate: float = 0.0,
        overlap_chunks: int = 1,
        devices_per_node: int | None = None,
        tensor_group: Any = None,
        use_data_before_expert_parallel: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise MoEConfigError(f"num_experts: got {num_experts}, expected a multiple of ep_size = {ep_size}")
        if use_tutel:
            text = "use_tutel means nothing here: tokens are dispatched without padding in any case"
            warnings.warn(with_code(text, "DSX156"), stacklevel=2)
        groups = expert_groups_of(
            ep_size,
            data_before_expert=use_data_before_expert_parallel,
            slices_experts=enable_expert_tensor_parallelism,
        )
        sliced = _tensor_group(tensor_group)
        self.hidden_size, self.num_experts, self.ep_size = hidden_size, num_experts, ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name, self.use_residual, self.name = groups.name, use_residual, name
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
            drop_policy=drop_policy,
            z_loss_weight=z_loss_weight,
            bias_update_rate=bias_update_rate,
        )
        if use_residual:
            self.mlp = _dense_expert(expert)
            self.coefficient = nn.Linear(hidden_size, 2)
        self.experts = self._own_experts(expert, groups, sliced)
        self.dispatch = ExpertDispatch(groups, overlap_chunks, devices_per_node, sliced)
        self.stats: LayerStats | None = None

    @property
    def groups(self) -> ExpertGroups:
        """The expert-parallel layout."""
        return self.dispatch.groups

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """DeepSpeed's second step of building a layer. Here the groups exist already, so it only checks their order.

        Raises:
            MoEConfigError: the layer was built in the other order.
        """
        if self.ep_size > 1 and use_data_before_expert_parallel_ != self.groups.data_before_expert:
            raise MoEConfigError(
                f"use_data_before_expert_parallel: got {use_data_before_expert_parallel_}, but "
                f"{self.name or 'the layer'} was built with {self.groups.data_before_expert}; give it to MoE(...)"
            )

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> MoEOutput:
        """Route the tokens, run the experts and combine their outputs.

        Args:
            hidden_states: [..., h], floating point.
            used_token: one entry per token; tokens whose entry is 0 or False are not routed, and their output is zero.

        Returns:
            (output [..., h], l_aux 0-D, exp_counts int64 [E]).

        Raises:
            MoEConfigError: shapes do not fit.
            RoutingError: the router's logits are not finite, on this rank or on another rank of the group.
        """
        if hidden_states.shape[-1:] != (self.hidden_size,) or not hidden_states.is_floating_point():
            raise MoEConfigError(
                f"{self.label}: got hidden states of {hidden_states.dtype} and shape {tuple(hidden_states.shape)}, "
                f"expected floating point of shape [..., {self.hidden_size}]"
            )
        refuse_wrappers(self.experts, self.groups, self.label)
        tokens = hidden_states.reshape(-1, self.hidden_size)
        logits = self.gate.logits(tokens)
        # on a device the number of kept routes is read with those of the other ranks
        routing, l_aux = self.gate.route(logits, used_token, cut=logits.device.type == "cpu")
        bad = torch.isfinite(logits.detach()).all().logical_not()
        dense: list[Any] = []  # output of the dense expert, which runs while tokens are sent
        during_transfer = (lambda: dense.append(self.mlp(hidden_states))) if self.use_residual else None
        out = self.dispatch(tokens, routing, self.experts, bad, self.label, during_transfer).view(hidden_states.shape)
        self.stats = stats_of(routing, l_aux)
        if self.use_residual:
            out = self._with_residual(hidden_states, out, dense[0])
        return MoEOutput(out, l_aux, routing.requested)

    @property
    def label(self) -> str:
        """Name of the layer in errors and events."""
        return self.name or f"MoE(hidden_size={self.hidden_size}, num_experts={self.num_experts})"

    def _with_residual(self, hidden_states: torch.Tensor, out: torch.Tensor, dense: Any) -> torch.Tensor:
        dense = dense[0] if isinstance(dense, tuple) else dense
        share = F.softmax(self.coefficient(hidden_states), dim=-1)
        return out * share[..., :1] + dense * share[..., 1:]

    def _own_experts(self, expert: Any, groups: ExpertGroups, sliced: Any) -> Experts | PackedExperts:
        count = self.num_local_experts
        first = groups.expert.rank * count
        if not isinstance(expert, PackedExperts):
            return Experts(expert, self.num_experts, first=first, count=count, group_name=groups.name)
        if (expert.count, expert.hidden_size) != (self.num_experts, self.hidden_size):
            raise MoEConfigError(
                f"expert: got {expert.count} packed experts of size {expert.hidden_size}, expected "
                f"{self.num_experts} of {self.hidden_size}"
            )
        if self.enable_expert_tensor_parallelism and sliced is not None and expert.tensor_group is None:
            raise MoEConfigError(
                "enable_expert_tensor_parallelism: the packed experts are not sliced; give them tensor_group as well"
            )
        return expert.shard(first, count, groups.name)


def name_layers(model: nn.Module) -> dict[str, MoE]:
    """Set the name of every `MoE` of a model, and return the layers by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for name, module in found.items():
        module.name = name or None
    return found


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether a model has an `MoE`, number of experts of the first one or 0)."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return (False, 0) if first is None else (True, first.num_experts)


def _dense_expert(expert: Any) -> nn.Module:
    """The dense expert of `use_residual`."""
    if isinstance(expert, PackedExperts):
        raise MoEConfigError("use_residual: packed experts have no dense form; give a module or a function")
    return copy.deepcopy(expert) if isinstance(expert, nn.Module) else expert(0)


def _tensor_group(given: Any) -> Any:
    """The group of ranks with the same activations; None if this rank is alone in it."""
    if not dsx_comm.is_initialized():
        return None
    if given is None:
        if parallel_groups.given().size("tensor") == 1:
            return None
        given = parallel_groups.given().axis("tensor").group
    return given if dsx_comm.get_world_size(given) > 1 else None


def _not_finite(name: str, ranks: list[int]) -> RoutingError:
    return RoutingError(
        f"{name}: the router's logits are not finite on rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))}; expected finite numbers. Look for a learning rate that is too high, or inputs "
        "that are not finite (torch.autograd.set_detect_anomaly)"
    )
