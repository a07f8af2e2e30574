"""The arithmetic of `pieces` by kernels that give the logarithms of their sums too: torch's flash attention, and
FlexAttention.

    sums = forward_of(q, k.shape[1], v.shape[3], segments, work)     # fused where a kernel fits, else by pieces
    sums.add(k, v, at)

A kernel computes the attention of one range of queries over one range of keys. What several ranges give is put together
by the logarithms. In backward flash attention is given the logarithms and results of the whole, which make the
gradients of each range exact. FlexAttention is run again, and differentiated by its result and its logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import pieces
from .cutting import Segments
from .pieces import Work, wide

__all__ = ["backward_of", "flash_fits", "flex_mask", "forward_of"]

Range = tuple[int, int]
_aten = torch.ops.aten


def forward_of(q: torch.Tensor, key_heads: int, features: int, segments: Segments, work: Work) -> Any:
    """`pieces.Forward`, or the same by a kernel."""
    kernel = _kernel_of(q, features, work)
    if kernel is None:
        return pieces.Forward(q, key_heads, features, segments, work)
    return _Forward(q, features, segments, work, kernel)


def backward_of(
    q: torch.Tensor, key_heads: int, features: int, saved: tuple[Any, Any], grad: torch.Tensor, segments: Segments,
    work: Work,
) -> Any:  # fmt: skip
    """`pieces.Backward` for what `forward_of` gave with the same arguments."""
    kernel = _kernel_of(q, features, work)
    if kernel is None:
        return pieces.Backward(q, key_heads, saved, grad, segments, work)
    return _Backward(q, saved, grad, segments, work, kernel)


def _kernel_of(q: torch.Tensor, features: int, work: Work) -> Any:
    if work.kernel == "flex":
        return _Flex
    if work.kernel != "pieces" and work.visible.plain and work.dropout is None and work.softcap is None:
        return _Flash if flash_fits(q, features) else None
    return None


def flash_fits(q: torch.Tensor, features: int) -> bool:
    """Whether torch has a flash kernel for these queries that gives logarithms, and gradients from them."""
    if q.shape[-1] != features or not q.numel():
        return False
    if q.device.type == "cpu":
        return hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    if q.device.type != "cuda" or q.dtype.itemsize != 2 or features % 8 or features > 256:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(q.device) >= (8, 0)


class _Pairs:
    """Ranges of queries with ranges of keys of which some can be seen. Ranges are equal, or have nothing in common."""

    def __init__(self, q: torch.Tensor, segments: Segments, work: Work) -> None:
        self.q, self.segments, self.work, self.dtype = q, segments, work, wide(q.dtype)

    def with_keys(self, k: torch.Tensor, v: torch.Tensor, keys: Segments) -> Iterator[tuple[Any, ...]]:
        """(rows, columns, keys and values for every head of queries, positions of both)."""
        times, begin = self.q.shape[1] // k.shape[1], 0
        for first, behind in self.segments:
            rows, column = slice(begin, begin + behind - first), 0
            for key, last in keys:
                columns = slice(column, column + last - key)
                column += last - key
                seen, end = self.work.visible.keys_of((first, behind), (key, last))
                if end > seen and behind > first:
                    some = [t[:, :, columns] for t in (k, v)]
                    some = some if times == 1 else [t.repeat_interleave(times, 1) for t in some]
                    yield rows, columns, some, (first, behind), (key, last)
            begin += behind - first


class _Forward:
    def __init__(self, q: torch.Tensor, features: int, segments: Segments, work: Work, kernel: Any) -> None:
        self._pairs, self._kernel = _Pairs(q, segments, work), kernel
        self._out = q.new_zeros((*q.shape[:-1], features), dtype=self._pairs.dtype)
        self._logs = q.new_full(q.shape[:-1], float("-inf"), dtype=self._pairs.dtype)

    def add(self, k: torch.Tensor, v: torch.Tensor, keys: Segments) -> None:
        """See `pieces.Forward`."""
        pairs = self._pairs
        for rows, _, some, at_rows, at_keys in pairs.with_keys(k, v, keys):
            added, logs = self._kernel.run(pairs.q[:, :, rows], *some, at_rows, at_keys, pairs.work)
            before = self._logs[:, :, rows]
            now = torch.logaddexp(before, logs.to(pairs.dtype))
            safe = now.masked_fill(now == float("-inf"), 0.0)
            share = (logs.to(pairs.dtype) - safe).exp()[..., None]
            kept = (before - safe).exp()[..., None]
            self._out[:, :, rows] = self._out[:, :, rows] * kept + added.to(pairs.dtype) * share
            self._logs[:, :, rows] = now

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, heads, tokens, value features), and the logarithms (batch, heads, tokens)."""
        return self._out, self._logs


class _Backward:
    def __init__(
        self, q: torch.Tensor, saved: tuple[Any, Any], grad: torch.Tensor, segments: Segments, work: Work, kernel: Any
    ) -> None:
        self._pairs, self._kernel = _Pairs(q, segments, work), kernel
        self._whole, self._given = saved, grad
        self._grad_q = torch.zeros_like(q, dtype=self._pairs.dtype, memory_format=torch.contiguous_format)

    def add(self, k: torch.Tensor, v: torch.Tensor, keys: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        """See `pieces.Backward`."""
        pairs, (out, logs) = self._pairs, self._whole
        grads = [torch.zeros_like(t, dtype=pairs.dtype, memory_format=torch.contiguous_format) for t in (k, v)]
        for rows, columns, some, at_rows, at_keys in pairs.with_keys(k, v, keys):
            whole = out[:, :, rows], logs[:, :, rows].contiguous()
            given = self._given[:, :, rows]
            of_q, *of_keys = self._kernel.gradients(
                given, pairs.q[:, :, rows], *some, whole, at_rows, at_keys, pairs.work
            )
            self._grad_q[:, :, rows] += of_q
            for total, one in zip(grads, of_keys):
                total[:, :, columns] += one.to(pairs.dtype).unflatten(1, (k.shape[1], -1)).sum(2)
        return grads[0], grads[1]

    def grad_q(self) -> torch.Tensor:
        """See `pieces.Backward`."""
        return self._grad_q


class _Flash:
    """Torch's flash attention, which `F.scaled_dot_product_attention` calls too."""

    @staticmethod
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Range, keys: Range, work: Work
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal = work.visible.causal and rows == keys
        if q.device.type == "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=work.scale)
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=work.scale)[:2]

    @staticmethod
    def gradients(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: tuple[Any, Any], rows: Range,
        keys: Range, work: Work,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        causal = work.visible.causal and rows == keys
        out, logs = whole
        if q.device.type == "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, logs, 0.0, causal, scale=work.scale
            )
        nothing = torch.zeros((), dtype=torch.uint64, device=q.device)  # the random state, which dropout alone reads
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logs, None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing,
            scale=work.scale,
        )  # fmt: skip


class _Flex:
    """FlexAttention, with masks by positions in the whole sequence."""

    @staticmethod
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Range, keys: Range, work: Work
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # lazy import: imports dynamo

        mask = flex_mask(work.visible, rows, keys, q.device)
        with_logs: Any = flex_attention  # its stubs know neither `return_aux` nor what it gives then
        found, aux = with_logs(q, k, v, block_mask=mask, scale=work.scale, return_aux=AuxRequest(lse=True))
        return found, aux.lse

    @staticmethod
    def gradients(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: tuple[Any, Any], rows: Range,
        keys: Range, work: Work,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        all_of_it, all_logs = whole
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            out, logs = _Flex.run(inputs[0], inputs[1], inputs[2], rows, keys, work)
        # this range's share of the whole depends on its logarithm: a query that sees nothing of it has none
        share = (logs.detach() - all_logs.masked_fill(all_logs == float("-inf"), 0.0)).exp()
        toward = share * (grad * (out.detach() - all_of_it)).sum(-1)
        given = grad * share[..., None].to(grad.dtype)
        return torch.autograd.grad((out, logs), inputs, (given, toward.to(logs.dtype)))


def flex_mask(visible: Any, rows: Range, keys: Range, device: torch.device) -> Any:
    """FlexAttention's mask for queries and keys at these positions; None where every key is seen."""
    from torch.nn.attention.flex_attention import create_block_mask  # lazy import: imports dynamo

    documents, window = visible.documents, visible.window
    if visible.plain and (not visible.causal or rows[0] >= keys[1] - 1):
        return None

    def seen(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        row, key = row + rows[0], key + keys[0]
        found = row >= key if visible.causal else key >= 0
        if window is not None:
            found = found & ((row - key).abs() < window)
        if documents is not None:
            found = found & (documents[b, row] == documents[b, key]) & (documents[b, row] >= 0)
        return found

    batch = None if documents is None else documents.shape[0]
    return create_block_mask(seen, batch, None, rows[1] - rows[0], keys[1] - keys[0], device=str(device))
