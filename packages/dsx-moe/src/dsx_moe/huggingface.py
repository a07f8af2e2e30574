"""Converts mixture-of-experts models of Hugging Face to expert parallelism, by rules, and back.

    replaced = apply_expert_parallel(model, ep_size=4)       # after from_pretrained, on every rank
    ...
    restore_experts(model); model.save_pretrained(folder)    # the original layout

The rules look at the form of a module, not at its class, so that unknown models are found too:

* packed: a module with a number `num_experts` whose parameters all have that many rows, and whose forward takes tokens,
  chosen experts and weights. This is the form of Mixtral, Qwen-MoE, OLMoE, DeepSeek and others since transformers 5.
  Only this module is replaced; the model's own router, shared experts and losses stay as they are.
* listed: a module with a `ModuleList` of experts and a linear router. This is the form of earlier models. The whole
  block is replaced. How its router turns logits into weights is read from the block, or given (`RouterRule`).

Before a module is replaced, a few random tokens are sent through it and through its replacement; if the results differ,
an error names the module. So a router or expert of an unknown kind is never silently computed differently. Names of
parameters stay, and each rank holds its slice of them. Left out: loading without all experts in memory once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from .errors import ConversionError, MoEConfigError
from .experts import Experts, ExpertShard, cut_to_shard, keep_expert_slices
from .gating import largest_indices
from .groups import expert_groups_of
from .layer import ExpertDispatch
from .probing import (
    is_close,
    is_feed_forward,
    listed_size,
    packed_reference,
    probe_inputs,
    random_tokens,
    returns_tuple,
)
from .routing import build_routing
from .rules import RouterRule, children_of, completed_rule, find_experts, is_packed, number_of_experts
from .segments import segment_matmul, to_device
from .slices import ExpertSlices
from .state import gather_numbered, gather_rows_of_experts
from .stats import LayerStats, stats_of
from .tensor_parallel import copy_to_group, sum_over_group
from .wrappers import refuse_wrappers

_CUTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}  # dimension and parts of the inner size


class PackedExpertShard(ExpertShard):
    """This rank's part of a packed experts module. It takes the same arguments as the module."""

    def __init__(self, module: nn.Module, dispatch: ExpertDispatch, name: str, slice_group: Any = None) -> None:
        total = int(module.num_experts)  # type: ignore[arg-type]
        groups = dispatch.groups
        count = total // groups.expert.size
        super().__init__(total, groups.expert.rank * count, count, groups.name)
        self.dispatch, self.name = dispatch, name
        self.stats: LayerStats | None = None
        self.is_feed_forward = is_feed_forward(module)
        keep_expert_slices(module, total, self.first, count)
        for key, parameter in list(module.named_parameters(recurse=False)):
            del module._parameters[key]
            self.register_parameter(key, parameter)
        self.slices = ExpertSlices(slice_group, _CUTS)
        for key in self.slices.cuts:
            parameter = self.get_parameter(key)
            # only the data changes: optimizers hold the parameter object
            parameter.data = self.slices.own(key, parameter.detach())
        module.num_experts = count  # type: ignore[assignment]
        self._original = (module,)  # in a tuple, so that it is not a child and names stay as they are
        self.mark()
        self.train(module.training)

    @property
    def original(self) -> nn.Module:
        """The replaced module, without its parameters."""
        return self._original[0]

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens [T, h], chosen experts int64 [T, K], weights [T, K] -> [T, h].

        A chosen expert with the number `num_experts` means no expert, as in transformers.
        """
        refuse_wrappers(self, self.dispatch.groups, self.name)
        shape = hidden_states.shape
        tokens, chosen = hidden_states.reshape(-1, shape[-1]), chosen.reshape(-1, chosen.shape[-1]).long()
        routing = build_routing(
            chosen.clamp(max=self.num_experts - 1),
            weights.reshape(chosen.shape),
            self.num_experts,
            wanted=chosen < self.num_experts,
            cut=chosen.device.type == "cpu",
        )
        bad = torch.isfinite(weights.detach()).all().logical_not()
        out = self.dispatch(tokens, routing, self.compute, bad, self.name)
        self.stats = stats_of(routing, None)
        return out.view(shape)

    def compute(self, rows: torch.Tensor, counts: Sequence[int], first: int = 0) -> torch.Tensor:
        """Compute the segments of this rank's experts; see `dsx_moe.dispatch.LocalExperts`."""
        if self.is_feed_forward:
            return self._feed_forward(rows, list(counts), slice(first, first + len(counts)))
        local = torch.arange(first, first + len(counts), device=rows.device)
        times = to_device(torch.tensor(list(counts), device="cpu"), rows.device)
        index = local.repeat_interleave(times, output_size=sum(counts)).unsqueeze(1)
        held: dict[str, torch.Tensor] = dict(self.named_parameters(recurse=False))
        out = functional_call(self.original, held, (rows, index, rows.new_ones(index.shape)))
        if not rows.shape[0]:  # no expert has run, but every parameter needs a (zero) gradient: add it to the graph
            for parameter in held.values():
                out = out + parameter.reshape(-1)[:0].sum().to(out.dtype)
        return out

    def _feed_forward(self, rows: torch.Tensor, counts: list[int], span: slice) -> torch.Tensor:
        if self.slices.group is not None:
            rows = copy_to_group(rows, self.slices.group)
        gate, up = segment_matmul(rows, self.get_parameter("gate_up_proj")[span].transpose(1, 2), counts).chunk(2, -1)
        inner = self.original.act_fn(gate) * up  # type: ignore[operator]
        out = segment_matmul(inner, self.get_parameter("down_proj")[span].transpose(1, 2), counts)
        return out if self.slices.group is None else sum_over_group(out, self.slices.group)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for key, _ in self.named_parameters(recurse=False):
            cut_to_shard(state_dict, prefix, key, self)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def restored(self) -> nn.Module:
        """The original module with all experts (collective)."""
        module = self.original
        for key, parameter in self.named_parameters(recurse=False):
            full = gather_rows_of_experts(self.slices.whole(key, parameter.detach()), self.dispatch.groups)
            module.register_parameter(key, nn.Parameter(full, parameter.requires_grad))
        module.num_experts = self.num_experts  # type: ignore[assignment]
        return module.train(self.training)


class ListedExpertBlock(nn.Module):
    """A block with a linear router and a list of experts, which holds only this rank's experts."""

    def __init__(self, block: nn.Module, rule: RouterRule, dispatch: ExpertDispatch, name: str) -> None:
        super().__init__()
        names = children_of(block, rule, name)
        experts = block.get_submodule(names["experts"])
        groups = dispatch.groups
        self.rule, self.dispatch, self.name, self.names = completed_rule(block, rule, name), dispatch, name, names
        self.num_experts = len(list(experts.children()))
        count = self.num_experts // groups.expert.size
        listed = list(experts.children())
        self.add_module(names["router"], block.get_submodule(names["router"]))
        shard = Experts(
            lambda number: listed[number],
            self.num_experts,
            first=groups.expert.rank * count,
            count=count,
            group_name=groups.name,
        )
        self.add_module(names["experts"], shard)
        for kind in ("shared_experts", "shared_experts_gate"):
            if names[kind]:
                self.add_module(names[kind], block.get_submodule(names[kind]))
        self.returns_logits = False
        self.stats: LayerStats | None = None
        self._original = (block,)
        self.train(block.training)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[..., h] -> [..., h]; or (that, the router's logits) if the original block returned a tuple."""
        if args or kwargs:
            raise ConversionError(f"{self.name}: got more arguments than hidden states; this block takes only them")
        experts: Any = self.get_submodule(self.names["experts"])
        refuse_wrappers(experts, self.dispatch.groups, self.name)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.get_submodule(self.names["router"])(tokens)
        chosen, weights = self._route(logits.float())
        routing = build_routing(chosen, weights, self.num_experts)
        bad = torch.isfinite(logits.detach()).all().logical_not()
        shared_outputs: list[torch.Tensor] = []  # output of the shared experts, which run while tokens are sent
        shares = bool(self.names["shared_experts"])
        work = (
            (lambda: shared_outputs.append(self.get_submodule(self.names["shared_experts"])(hidden_states)))
            if shares
            else None
        )
        out = self.dispatch(tokens, routing, experts, bad, self.name, work).view(hidden_states.shape)
        self.stats = stats_of(routing, None)
        if shares:
            shared = shared_outputs[0]
            if self.names["shared_experts_gate"]:
                shared = torch.sigmoid(self.get_submodule(self.names["shared_experts_gate"])(hidden_states)) * shared
            out = out + shared
        return (out, logits) if self.returns_logits else out

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.softmax(logits, dim=-1) if self.rule.score_func == "softmax" else torch.sigmoid(logits)
        chosen = largest_indices(scores.detach(), self.rule.top_k or 1)
        weights = scores.gather(1, chosen)
        if self.rule.route_norm:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        return chosen, weights * self.rule.route_scale

    def restored(self) -> nn.Module:
        """The original block with all experts (collective)."""
        block = self._original[0]
        shard: Any = self.get_submodule(self.names["experts"])
        states = gather_numbered(shard, self.dispatch.groups)
        listed = []
        for number in range(self.num_experts):
            made = copy.deepcopy(shard[shard.first])
            made.load_state_dict(states[number])
            listed.append(made)
        block.set_submodule(self.names["experts"], nn.ModuleList(listed))
        return block.train(self.training)


def apply_expert_parallel(
    model: nn.Module,
    ep_size: int,
    *,
    pattern: str | None = None,
    rule: RouterRule | None = None,
    overlap_chunks: int = 1,
    devices_per_node: int | None = None,
    tensor_group: Any = None,
    slice_experts: bool = False,
    use_data_before_expert_parallel: bool = False,
    check: bool = True,
    may_lack: bool = False,
) -> list[str]:
    """Replace the experts of a model by this rank's experts, in place (collective over all ranks).

    Args:
        model: a model with the same weights on every rank.
        ep_size: number of ranks among which the experts of each layer are divided.
        pattern: a regular expression; only modules whose whole name it matches are replaced. None: all modules that
            have the form of experts.
        rule: how the router of listed experts works; see `RouterRule`.
        slice_experts: cut each expert's inner size over `tensor_group` (packed feed-forward experts only).
        overlap_chunks, devices_per_node, tensor_group, use_data_before_expert_parallel: see `MoE`.
        check: compare every module with its replacement on a few random tokens. Modules on the meta device are not
            compared.
        may_lack: return an empty list if no experts are found, instead of an error; for a stage of a pipeline.

    Returns:
        The names of the replaced modules.

    Raises:
        ConversionError: no experts were found, the experts of a layer do not divide, or a module computes something
            else than its replacement. The model is unchanged then.
        MoEConfigError: `ep_size` does not fit the ranks.
    """
    rule = rule or RouterRule()
    found = find_experts(model, pattern, rule)
    if not found and may_lack:
        return []
    if not found:
        where = f"matches {pattern!r} and " if pattern else ""
        raise ConversionError(
            f"no module of the model {where}has the form of experts: parameters of `num_experts` rows and a forward of "
            "tokens, experts and weights; or a ModuleList and a linear router (give pattern and rule to name it)"
        )
    for name, module in found.items():
        total = number_of_experts(module, rule, name)
        if total % ep_size:
            raise ConversionError(f"{name}: got {total} experts, expected a multiple of ep_size = {ep_size}")
        if check and not any(p.is_meta for p in module.parameters()):
            _probe(module, rule, name)
    if slice_experts:
        _check_slices(found, tensor_group)
    groups = expert_groups_of(ep_size, data_before_expert=use_data_before_expert_parallel, slices_experts=slice_experts)
    dispatch = ExpertDispatch(groups, overlap_chunks, devices_per_node, tensor_group)
    for name, module in found.items():
        if is_packed(module):
            made: nn.Module = PackedExpertShard(module, dispatch, name, tensor_group if slice_experts else None)
        else:
            made = ListedExpertBlock(module, rule, dispatch, name)
            made.returns_logits = returns_tuple(module, rule, name)
        model.set_submodule(name, made)
    return list(found)


def _check_slices(found: dict[str, nn.Module], group: Any) -> None:
    """Raise an error for experts that cannot be cut over a group, before any is replaced."""
    if group is None:
        raise MoEConfigError("slice_experts: got no tensor_group, expected the ranks that share the slices")
    for name, module in found.items():
        if not is_packed(module) or not is_feed_forward(module):
            raise ConversionError(
                f"{name}: ({type(module).__name__}) cannot be sliced: expected packed experts down(act(gate) * up) "
                "with gate_up_proj and down_proj; leave slice_experts out"
            )
        shapes = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
        ExpertSlices(group, _CUTS).check(shapes, name)


def restore_experts(model: nn.Module) -> list[str]:
    """Undo `apply_expert_parallel`: every rank has all experts again (collective over the expert-parallel ranks).

    Returns the names of the restored modules. Existing optimizers hold the parameters of this rank's experts only, so
    build new optimizers.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, PackedExpertShard | ListedExpertBlock)}
    for name, module in found.items():
        model.set_submodule(name, module.restored())
    return list(found)


def _probe(module: nn.Module, rule: RouterRule, name: str) -> None:
    """Raise an error if a module computes something else than its replacement, on a few random tokens."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if is_packed(module):
                inputs = probe_inputs(module, int(module.num_experts))  # type: ignore[arg-type]
                expected, got = module(*inputs), packed_reference(module, *inputs, feed_forward=False)
            else:
                tokens = random_tokens(module, listed_size(module, rule, name))
                found = module(tokens.unsqueeze(0))
                expected = found[0] if isinstance(found, tuple) else found
                alone = ExpertDispatch(expert_groups_of(1))
                got = ListedExpertBlock(copy.deepcopy(module), rule, alone, name).eval()(tokens.unsqueeze(0))
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise ConversionError(f"{name}: a few tokens cannot be sent through it: {error}") from error
    finally:
        module.train(training)
    if not is_close(expected, got):
        raise ConversionError(
            f"{name}: ({type(module).__name__}) gives other outputs than its expert-parallel form, so it is left as it "
            "is. Packed experts must be a weighted sum over the chosen experts; for listed experts give RouterRule "
            "(top_k, score_func, route_norm, route_scale)"
        )
