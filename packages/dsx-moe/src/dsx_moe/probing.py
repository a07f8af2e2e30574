"""Random tokens through an experts module: its form, its results, and the results that its replacement must have."""

from __future__ import annotations

import torch
from torch import nn

from .rules import RouterRule, children_of

__all__ = [
    "is_close", "is_feed_forward", "listed_size", "packed_reference", "probe_inputs", "random_tokens", "returns_tuple",
]  # fmt: skip

_PROBE_TOKENS = 12


def is_feed_forward(module: nn.Module) -> bool:
    """Whether a packed module is down(act(gate) * up) over `gate_up_proj` [E, 2n, h] and `down_proj` [E, h, n]."""
    held = dict(module.named_parameters(recurse=False))
    if set(held) != {"gate_up_proj", "down_proj"} or not callable(getattr(module, "act_fn", None)):
        return False
    up, down = held["gate_up_proj"], held["down_proj"]
    if up.dim() != 3 or down.dim() != 3 or up.shape[1] != 2 * down.shape[2] or up.shape[2] != down.shape[1]:
        return False
    if up.is_meta:
        return not getattr(module, "is_transposed", False)
    inputs = probe_inputs(module, int(module.num_experts))  # type: ignore[arg-type]
    with torch.no_grad():
        return is_close(module(*inputs), packed_reference(module, *inputs, feed_forward=True))


def packed_reference(
    module: nn.Module, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, feed_forward: bool
) -> torch.Tensor:
    """The result that the expert-parallel form must have: each token's sum of weight times the output of the expert."""
    out = torch.zeros_like(tokens, dtype=torch.float32)
    for column in range(chosen.shape[1]):
        index = chosen[:, column : column + 1]
        if feed_forward:
            rows = [_one_feed_forward(module, token, int(e)) for token, e in zip(tokens, index.view(-1), strict=True)]
            part = torch.stack(rows)
        else:
            part = module(tokens, index, torch.ones_like(weights[:, :1]))
        out += part.float() * weights[:, column : column + 1].float()
    return out


def _one_feed_forward(module: nn.Module, token: torch.Tensor, expert: int) -> torch.Tensor:
    gate, up = (module.get_parameter("gate_up_proj")[expert] @ token).chunk(2)
    return module.get_parameter("down_proj")[expert] @ (module.act_fn(gate) * up)  # type: ignore[operator]


def probe_inputs(module: nn.Module, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens [12, h], chosen experts [12, 2 or fewer] of `total`, and their weights, for a packed module."""
    size = next(
        (int(s) for s in (getattr(module, n, None) for n in ("hidden_dim", "hidden_size")) if isinstance(s, int)),
        next(module.parameters()).shape[-1],
    )
    tokens = random_tokens(module, size)
    chosen = torch.stack([torch.randperm(total, device="cpu")[: min(2, total)] for _ in range(_PROBE_TOKENS)]).to(
        tokens.device
    )
    return tokens, chosen, torch.rand(chosen.shape, device=tokens.device).to(tokens.dtype)


def random_tokens(module: nn.Module, size: int) -> torch.Tensor:
    """Random tokens [12, size], with device and dtype of the module's parameters."""
    like = next(module.parameters())
    return torch.randn(_PROBE_TOKENS, size, device="cpu").to(like.device, like.dtype)


def listed_size(module: nn.Module, rule: RouterRule, name: str) -> int:
    """The hidden size of a block with a list of experts: the width of its router."""
    router = module.get_submodule(children_of(module, rule, name)["router"])
    return int(next(router.parameters()).shape[-1])


def returns_tuple(module: nn.Module, rule: RouterRule, name: str) -> bool:
    """Whether a block with a list of experts returns a tuple; False for one on the meta device."""
    if any(p.is_meta for p in module.parameters()):
        return False
    training = module.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = module.eval()(random_tokens(module, listed_size(module, rule, name)).unsqueeze(0))
    module.train(training)
    return isinstance(found, tuple)


def is_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two results are equal up to rounding error: 5e-2 of the largest value in 16 bits, else 1e-4."""
    coarse = 5e-2 if left.dtype in (torch.bfloat16, torch.float16) else 1e-4
    scale = float(left.float().abs().max()) or 1.0
    return bool(((left.float() - right.float()).abs().max() / scale) < coarse)
