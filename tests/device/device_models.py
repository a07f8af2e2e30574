"""The models of `device_program.py`. They import what they need, so that a case loads no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a layer norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.behind(x))))


class Language(nn.Module):
    """A small GPT whose forward returns the loss; `places` wraps the call of a block."""

    def __init__(self, width: int = 32, layers: int = 3, vocabulary: int = 64, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.call: Callable[..., torch.Tensor] = lambda block, x: block(x)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length, vocabulary)."""
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(self.norm(hidden))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.logits(tokens)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Words(nn.Module):
    """An embedding whose weight a pipeline's last stage uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(64, 32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


class Mixed(nn.Module):
    """A layer of experts in a stage."""

    def __init__(self, ep_size: int) -> None:
        import dsx_moe

        super().__init__()
        expert = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        drawn = {"top2_2nd_expert_sampling": False, "use_rts": False}  # random numbers are not the CPU's
        self.moe = dsx_moe.MoE(32, expert, num_experts=4, ep_size=ep_size, k=2, drop_tokens=False, **drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def next_words(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a pipeline's last stage."""
    return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


class Experts(nn.Module):
    """A layer of experts between two linear ones; forward returns the loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import dsx_moe

        super().__init__()
        expert = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        drawn = {"top2_2nd_expert_sampling": False, "use_rts": False}  # random numbers are not the CPU's
        self.moe = dsx_moe.MoE(
            hidden_size=16, expert=expert, num_experts=4, ep_size=dist.get_world_size(), k=2, **drawn, **settings
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.moe(self.first(x))
        return self.last(hidden).square().mean() + 0.01 * balance


class ManyExperts(nn.Module):
    """Three layers of experts, each a unit of its own; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(Mixed(dist.get_world_size()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden).square().mean()


class Sliced(nn.Module):
    """A feed-forward part whose weights are sliced over the ranks (of `group`); forward returns the loss."""

    def __init__(self, group: Any = None) -> None:
        from dsx_pipe.tensor import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.first = nn.Linear(16, 16)
        self.up, self.down = ColumnParallelLinear(16, 64, group=group), RowParallelLinear(64, 16, group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.down(F.gelu(self.up(self.first(x))))).square().mean()


class Codes(torch.Tensor):
    """A frozen weight in 8 bits with a scale for each row, as torchao has them: a tensor of two inner tensors."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Codes:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Codes:
        return Codes(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::detach":
            return cls(args[0].codes, args[0].scale)
        plain = [a.codes * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Sent(torch.Tensor):
    """A trained weight that FSDP2's hooks send in 8 bits, with one scale that a message of its own finds."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Sent:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values: torch.Tensor) -> None:
        self.held = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Sent:
        return Sent(inner["held"])

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Any, Any]:
        largest = self.held.abs().max()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / 127
        return ((self.held / scale).round().to(torch.int8),), scale

    def fsdp_post_all_gather(self, outputs: Any, scale: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            torch.mul(outputs[0], scale, out=out)
            return None
        made = outputs[0] * scale
        return made, (made,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.held if isinstance(a, cls) else a for a in args]
        found = func(*plain, **(kwargs or {}))
        return cls(found) if func.name() in ("aten::detach", "aten::_to_copy") else found


class SentLayers(nn.Module):
    """Layers with such weights, each a unit of its own; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for layer in self.layers:
            layer.weight = nn.Parameter(Sent(layer.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class Adapted(nn.Module):
    """Layers with frozen weights in codes, and small trained matrices beside them; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bases = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.adapters = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for base in self.bases:
            base.weight = nn.Parameter(Codes.of(base.weight), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, adapter in zip(self.bases, self.adapters):
            x = x + torch.tanh(base(x) + adapter(x))
        return x.square().mean()


class SlicedLayers(nn.Module):
    """Three sliced feed-forward parts, each a unit of its own; forward returns the loss."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sliced(group) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x = x - layer.down(F.gelu(layer.up(layer.first(x))))
            total = total + x.square().mean()
        return total
