"""The parametrisations, which compute the weight that a layer uses from the stored weight.

Each technique is a module registered with `torch.nn.utils.parametrize`. The stored parameter stays the one that the
optimizer trains; the layer's `weight` is computed from it in every forward pass. Techniques of one tensor run in the
order of `init_compression`: the quantiser first, then the masks.

A technique does nothing until `CompressionScheduler` switches it on. Masks that are computed once are buffers;
learnable scores are parameters. So a state dict has all of them, and its names do not change during training.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from . import masks
from .bits import BitSchedule
from .quantizers import Encoded, Kind, Rounding, encode, fake_quantize, require_finite

__all__ = [
    "ActivationQuantizer", "HeadMask", "Mask", "OutputMask", "SharedMask", "SparseMask", "Technique",
    "WeightQuantizer",
]  # fmt: skip


class Technique(nn.Module):
    """Base of all techniques.

    Args:
        method: key of the section, such as `row_pruning`.
        group: name of the group.
        layer: name of the layer, for messages.
        offset: number of steps after which it is switched on.
    """

    def __init__(self, method: str, group: str, layer: str, offset: int) -> None:
        super().__init__()
        self.method, self.group, self.layer, self.offset = method, group, layer, offset
        self.enabled = False

    def needs_weight(self, step: int) -> bool:
        """Whether `advance` at this step reads the weight."""
        return False

    def advance(self, step: int, weight: torch.Tensor | None, factor: int) -> None:
        """Make the changes that are due when `step` steps are done.

        Args:
            weight: the tensor before all techniques; None unless `needs_weight(step)`.
            factor: 1 + floor(4 x eigenvalue) of the layer's block; 1 without eigenvalues.
        """
        self.enabled = self.enabled or step >= self.offset

    def finish(self, weight: torch.Tensor) -> bool:
        """Go to the state at the end of the schedule.

        Args:
            weight: the tensor before all techniques.

        Returns:
            Whether the technique was on already and the tensor that the layer uses changes.
        """
        self.enabled = True
        return False

    def progress(self) -> dict[str, Any]:
        """The state that does not follow from the number of steps, as plain numbers."""
        return {}

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore what `progress` returned."""

    def extra_repr(self) -> str:
        return f"{self.method}, group={self.group!r}, offset={self.offset}, enabled={self.enabled}"


class WeightQuantizer(Technique):
    """Fake quantisation of a weight.

    The number of bits falls (`BitSchedule`). With a mixture, the layer uses ratio x weight + (1 - ratio) x quantised
    weight, and the ratio falls from 1 to 0.

    Args:
        groups, kind, rounding: arguments of the quantiser, see `quantizers.encode`. The groups of an
            embedding, and of a layer tied to it, are its rows.
        schedule: the bits over training.
        change: how much the ratio falls with each step; 0: no mixture.
    """

    def __init__(
        self, group: str, layer: str, offset: int, groups: int, kind: Kind, rounding: Rounding, schedule: BitSchedule,
        change: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__("weight_quantization", group, layer, offset)
        self.groups, self.schedule = groups, schedule
        self.kind: Kind = kind
        self.rounding: Rounding = rounding
        self.change = change
        self.ratio = 1.0 if change else 0.0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return weight
        quantized = fake_quantize(weight, self.schedule.bits, self.groups, self.kind, self.rounding)
        # Both terms pass the gradient through unchanged, and their factors add up to 1: so does the mixture.
        return torch.lerp(quantized, weight, self.ratio) if self.ratio else quantized

    def advance(self, step: int, weight: torch.Tensor | None, factor: int) -> None:
        super().advance(step, weight, factor)
        if self.enabled and step > self.offset:
            self.schedule.advance(step - self.offset, factor)
            self.ratio = max(0.0, self.ratio - self.change)

    def finish(self, weight: torch.Tensor) -> bool:
        before = (self.schedule.bits, self.ratio) if self.enabled else None
        self.enabled, self.ratio = True, 0.0
        self.schedule.finish()
        return before is not None and before != (self.schedule.bits, 0.0)

    def encode(self, weight: torch.Tensor) -> Encoded:
        """Codes and scales of a weight at the present number of bits, rounded to nearest."""
        return encode(weight, self.schedule.bits, self.groups, self.kind)

    def progress(self) -> dict[str, Any]:
        return {"ratio": self.ratio, **self.schedule.state_dict()}

    def restore(self, progress: dict[str, Any]) -> None:
        self.ratio = float(progress["ratio"])
        self.schedule.load_state_dict(progress)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.schedule.bits}, {self.kind}, groups={self.groups}"


class Mask(Technique):
    """Base of the masks. A mask is either fixed, in the buffer `mask`, or keeps the largest of the learnable `scores`.

    Args:
        ratio: fraction of the mask's elements that is kept.
        shape: shape of the mask and the scores.
        like: tensor whose dtype and device the scores get.
        learnable: learn scores instead of computing the mask once.
    """

    def __init__(
        self, method: str, group: str, layer: str, offset: int, ratio: float, shape: tuple[int, ...],
        like: torch.Tensor, *, learnable: bool,
    ) -> None:  # fmt: skip
        super().__init__(method, group, layer, offset)
        self.ratio, self.learnable = ratio, learnable
        if learnable:
            self.scores = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
            nn.init.kaiming_uniform_(self.scores, a=math.sqrt(5))
        else:
            self.register_buffer("mask", torch.ones(shape, dtype=torch.bool, device=like.device))
        self.keep = masks.kept_count(ratio, math.prod(shape))
        """The number of elements of the mask that are kept."""

    def _mask_buffer(self) -> torch.Tensor:
        return self.get_buffer("mask")

    def current(self) -> torch.Tensor:
        """The mask: boolean if it is fixed; 0 and 1 with a gradient to the scores if it is learnable."""
        return masks.straight_through_top(self.scores, self.keep) if self.learnable else self._mask_buffer()

    def kept(self) -> torch.Tensor:
        """The mask as booleans, without a gradient."""
        with torch.no_grad():
            return self.current().bool()

    def spread(self, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The mask in a shape that broadcasts to that of the weight."""
        return mask.view(weight.shape)

    def scores_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The scores from which a fixed mask is computed, in the shape of the mask."""
        raise NotImplementedError

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.spread(self.current(), weight).to(weight.dtype) if self.enabled else weight

    def _must_be_computed(self) -> bool:
        """Whether the fixed mask has not been computed yet: only then it keeps more elements than `keep`."""
        return not self.learnable and self.keep < self._mask_buffer().numel() and bool(self._mask_buffer().all())

    def needs_weight(self, step: int) -> bool:
        return not self.enabled and step >= self.offset and self._must_be_computed()

    def advance(self, step: int, weight: torch.Tensor | None, factor: int) -> None:
        if weight is not None:
            self._compute(weight)
        super().advance(step, weight, factor)

    def _compute(self, weight: torch.Tensor) -> None:
        require_finite(weight, self.layer)
        self._mask_buffer().copy_(masks.top_mask(self.scores_of(weight), self.keep))

    def finish(self, weight: torch.Tensor) -> bool:
        if self._must_be_computed():
            self._compute(weight)
        return super().finish(weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dense_ratio={self.ratio}, {'learnable' if self.learnable else 'fixed'}"


class SparseMask(Mask):
    """Keeps single weights: those with the largest |w| when it is switched on, or with the largest learnable scores."""

    def scores_of(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().abs()


class OutputMask(Mask):
    """Keeps outputs: rows of a linear layer, or channels of a convolution.

    Args:
        dim: dimension of the weight that counts the outputs.
    """

    def __init__(self, *args: Any, dim: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.dim = dim

    def spread(self, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shape = [1] * weight.dim()
        shape[self.dim] = -1
        return mask.view(shape)

    def scores_of(self, weight: torch.Tensor) -> torch.Tensor:
        return masks.row_norms(weight, self.dim).view(self._mask_buffer().shape)


class HeadMask(Mask):
    """Keeps heads: blocks of inputs of an attention's output matrix. Its scores are always learnable.

    Args:
        dim: dimension of the weight that counts the inputs.
    """

    def __init__(self, *args: Any, dim: int = 1, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.dim = dim

    @property
    def heads(self) -> int:
        """Number of heads before pruning."""
        return self.scores.numel()

    def spread(self, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inputs = mask.view(-1).repeat_interleave(weight.shape[self.dim] // mask.numel())
        return inputs.view([-1 if d == self.dim else 1 for d in range(weight.dim())])


class SharedMask(Technique):
    """Applies the mask of a layer's outputs to a vector: the layer's bias, or weight and bias of the batch norm that
    follows.
    """

    def __init__(self, owner: OutputMask) -> None:
        super().__init__(owner.method, owner.group, owner.layer, owner.offset)
        self._owner = (owner,)  # in a tuple, so that it does not become a child module: the scores belong to the weight

    @property
    def owner(self) -> OutputMask:
        """The technique on the weight, whose mask is applied."""
        return self._owner[0]

    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        owner = self.owner
        return vector * owner.current().view(-1).to(vector.dtype) if owner.enabled else vector


class ActivationQuantizer(Technique):
    """Fake quantisation of a layer's input, applied by a forward pre-hook.

    Dynamic: each token (the last dimension) or each image has its own scale. Static: all inputs share one range, the
    running minimum and maximum of training, in the buffer `range`. The first batch sets it; after that it follows each
    batch with momentum 0.95.

    Args:
        like: tensor on whose device the range is kept.
        static: one running range instead of one scale per token.
        images: inputs of four dimensions have one scale per image.
    """

    momentum = 0.95

    def __init__(
        self,
        group: str,
        layer: str,
        offset: int,
        bits: int,
        kind: Kind,
        like: torch.Tensor,
        *,
        static: bool,
        images: bool,
    ) -> None:
        super().__init__("activation_quantization", group, layer, offset)
        self.bits, self.static, self.images = bits, static, images
        self.kind: Kind = kind
        if static:
            self.register_buffer("range", torch.zeros(2, dtype=torch.float32, device=like.device))
        self.calibrating = False
        """Update the static range also in evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        if self.static and (self.training or self.calibrating):
            self._observe(x.detach())
        if not self.enabled:
            return x
        if self.static:
            return _QuantizeInRange.apply(x, self.bits, self.kind, self.get_buffer("range"))  # pyright: ignore
        groups = len(x) if self.images and x.dim() == 4 else x.numel() // x.shape[-1]
        return fake_quantize(x, self.bits, max(1, groups), self.kind) if x.numel() else x

    def _observe(self, x: torch.Tensor) -> None:
        if not x.numel():
            return
        found = torch.stack(torch.aminmax(x)).float()
        known = self.get_buffer("range")
        unset = known[0] == known[1]
        known.copy_(torch.where(unset, found, torch.lerp(found, known, self.momentum)))

    def extra_repr(self) -> str:
        how = "static" if self.static else "dynamic"
        return f"{super().extra_repr()}, bits={self.bits}, {self.kind}, {how}"


class _QuantizeInRange(torch.autograd.Function):
    """Quantises with a given range; the gradient passes through unchanged."""

    @staticmethod
    def forward(x: torch.Tensor, bits: int, kind: Kind, known: torch.Tensor) -> torch.Tensor:
        low, high = known.to(torch.float64 if x.dtype == torch.float64 else torch.float32).unbind()
        wide = x.to(low.dtype)
        if kind == "symmetric":
            scale = 2.0 * torch.maximum(low.abs(), high.abs()) / 2**bits
            codes = torch.round(wide / torch.where(scale == 0, 1.0, scale))
            return (codes.clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale).to(x.dtype)
        scale = (high - low) / 2**bits
        divisor = torch.where(scale == 0, 1.0, scale)
        zero = torch.where(scale == 0, low, torch.round(low / divisor) * scale)
        return (torch.round((wide - zero) / divisor).clamp_(0, 2**bits - 1) * scale + zero).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return gradients[0], None, None, None
