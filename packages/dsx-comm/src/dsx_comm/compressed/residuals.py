"""Error feedback for quantised messages: what one message leaves out is added to the next (LoCo, arXiv:2407.04480).

    sent  = Q(x + e)
    e    <- decay * e + (1 - decay) * (x + e - sent)

With a decay of 0 nothing is ever lost, only late. Between two messages the errors are kept as int8 by blocks, one byte
per element; what that rounds off is a hundredth of what they are.

`ErrorFeedback` (`feedback.py`) is the memory of the 1-bit all-reduce; this one is for messages of blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from ..errors import CommArgumentError
from .blocks import BlockFormat, dequantize_rows, quantize_rows

__all__ = ["QuantizationFeedback"]

_KEPT = BlockFormat(8, 256)


class QuantizationFeedback:
    """The memory of one buffer that is sent quantised again and again, in one or more hops.

    Args:
        decay: how much of the error before stays in an average of errors, in [0, 1): LoCo's `err_beta`; 0 keeps all of
            the latest.
        period: after so many calls of `advance` the errors are forgotten; 0: never. LoCo's `reset_T`.

    Raises:
        CommArgumentError: a decay or period out of range.
    """

    def __init__(self, decay: float = 0.0, period: int = 0) -> None:
        if not 0.0 <= decay < 1.0:
            raise CommArgumentError(f"decay: got {decay}, expected a number in [0, 1)")
        if period < 0:
            raise CommArgumentError(f"period: got {period}, expected at least 0")
        self._decay, self._period, self._count = decay, period, 0
        self._errors: dict[Hashable, torch.Tensor] = {}
        self._next: dict[Hashable, torch.Tensor] = {}
        self._shapes: dict[Hashable, torch.Size] = {}

    def advance(self) -> None:
        """The buffer has new values: messages from now on make up for what the latest ones left out. Until the next
        call equal values are sent as equal messages.
        """
        self._count += 1
        self._errors.update(self._next)
        self._next.clear()
        if self._period and self._count % self._period == 0:
            self._errors.clear()

    @property
    def period(self) -> int:
        """The number of calls of `advance` after which the errors are cleared; 0: never."""
        return self._period

    @property
    def calls(self) -> int:
        """The number of calls of `advance`."""
        return self._count

    def encode(self, hop: Hashable, rows: torch.Tensor, form: BlockFormat) -> torch.Tensor:
        """The messages (uint8 [R, message_bytes]) of `rows` (float [R, n]) with what earlier ones of this hop left
        out.
        """
        total = rows.to(torch.float32)
        if total.data_ptr() == rows.data_ptr():
            total = total.clone()
        self._shapes[hop] = total.shape
        before = self._errors.get(hop)
        error = None
        if before is not None:
            error = self._decoded(hop, before)
            total.add_(error)
        messages = quantize_rows(total, form)
        sent = torch.empty_like(total)
        dequantize_rows(messages, form, sent)
        total.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)  # a gradient that is not finite is not made up for
        if self._decay:
            total.mul_(1.0 - self._decay)
            if error is not None:
                total.add_(error, alpha=self._decay)
        self._next[hop] = quantize_rows(total, _KEPT)
        return messages

    def held(self, *, upcoming: bool = True) -> dict[Hashable, torch.Tensor]:
        """The errors by hop, float32 rows as they were given to `encode`: those that count from the next `advance` on
        (`upcoming`), or those that count until then.
        """
        kept = {**self._errors, **self._next} if upcoming else self._errors
        return {hop: self._decoded(hop, error) for hop, error in kept.items()}

    def put(self, errors: Mapping[Hashable, torch.Tensor], *, calls: int = 0) -> None:
        """Take errors as `held` gives them, which count from the next `advance` on; those that are there are
        forgotten. `calls`: how often `advance` had been called (`QuantizationFeedback.calls`).
        """
        self.reset()
        self._count = calls
        self._next = {hop: rows.to(torch.float32).clone() for hop, rows in errors.items()}
        self._shapes = {hop: rows.shape for hop, rows in errors.items()}

    def _decoded(self, hop: Hashable, kept: torch.Tensor) -> torch.Tensor:
        """Errors as values; those that were `put` are values until the next message."""
        if kept.is_floating_point():
            return kept.clone()
        error = torch.empty(self._shapes[hop], dtype=torch.float32, device=kept.device)
        dequantize_rows(kept, _KEPT, error)
        return error

    def reset(self) -> None:
        """Forget all errors."""
        self._errors.clear()
        self._next.clear()

    def tensors(self) -> list[torch.Tensor]:
        """The errors, as they are kept."""
        return [found for kept in (self._errors, self._next) for found in kept.values()]
