"""Quantisers, one-bit signs, layer norm, GELU, dropout, softmax and token moves: bytes per second beside torch's copy
and beside torch operations.

    python packages/dsx-ops/bench/kernels.py [--elements 16000000] [--rounds 11] [--threads N]
        [--jobs onebit ...] [--json FILE]

A kernel's bytes are what it must read and write. The copy moves as many bytes as the elements have in fp32, twice. Run
it on an idle machine.
"""

from __future__ import annotations

import sys

import dsx_ops
import torch
from _measure import Contender, Goal, Job, copy_contender, keep_memory, run_jobs
from dsx_ops import onebit
from dsx_ops.codes.exchange import reduce_dequantize, reduce_quantize, swizzle_quantize

SHARE = 0.7  # of the copy's bandwidth


def judged(found: list[Contender], *more: Goal) -> Job:
    """Every contender of ours against the copy, which comes first."""
    return Job(
        found, [*(Goal(c.name, "torch copy_", SHARE, rate=True) for c in found if c.name.startswith("dsx")), *more]
    )


def signs(n: int) -> Job:
    """Pack with error feedback, against the operations of torch that do the same."""
    x, error, kept = torch.randn(n), torch.zeros(n), torch.zeros(n)
    packed, scale = onebit.compress_with_feedback(x, error.clone())
    rows, scales, out = packed.view(1, -1).expand(4, -1).contiguous(), scale.expand(4).contiguous(), torch.empty(n)
    weights = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8)

    def chain() -> None:
        t = x + kept
        size = t.norm() / n**0.5
        sign = t >= 0
        (sign.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)
        kept.copy_(t - torch.where(sign, size, -size))

    found = [
        copy_contender(8 * n),
        Contender("dsx compress_with_feedback", 20.125 * n, lambda: onebit.compress_with_feedback(x, error)),
        Contender("torch operations, the same", 20.125 * n, chain),
        Contender("dsx pack_signs", 4.125 * n, lambda: onebit.pack_signs(x)),
        Contender("dsx unpack_signs", 4.125 * n, lambda: onebit.unpack_signs(packed, scale, n, out=out)),
        Contender("dsx mean_of_signs, 4 ranks", 4.5 * n, lambda: onebit.mean_of_signs(rows, scales, out=out)),
    ]
    return judged(found, Goal("dsx compress_with_feedback", "torch operations, the same", 10.0))


def integers(n: int) -> Job:
    """int8 and int4, fp32 in and out, groups of 256."""
    x, out = torch.randn(n), torch.empty(n)
    found = [copy_contender(8 * n)]
    for label, how, size in (
        ("int8", {"bits": 8}, 1.0),
        ("int4", {"bits": 4}, 0.5),
        ("int8 asymmetric", {"bits": 8, "symmetric": False}, 1.0),
        ("int4 asymmetric", {"bits": 4, "symmetric": False}, 0.5),
    ):
        q = dsx_ops.quantize(x, **how)
        nbytes = (4 + size + 4 / 256) * n
        found += [
            Contender(f"dsx quantize {label}", nbytes, lambda q=q, how=how: dsx_ops.quantize(x, out=q, **how)),
            Contender(f"dsx dequantize {label}", nbytes, lambda q=q, how=how: dsx_ops.dequantize(q, n, out=out, **how)),
        ]
    q = dsx_ops.quantize(x)
    noisy = lambda: dsx_ops.quantize(x, stochastic=True, out=q)  # noqa: E731
    found.append(Contender("dsx quantize int8 stochastic", (5 + 4 / 256) * n, noisy))

    def chain() -> None:
        rows = x.view(-1, 256)
        scale = rows.abs().amax(1, keepdim=True) / 127
        (rows / scale).round_().clamp_(-127, 127).to(torch.int8)

    found.append(Contender("torch operations, int8", (5 + 4 / 256) * n, chain))
    return judged(found)


def floats(n: int) -> Job:
    """fp8, and int8 from bf16."""
    x, out, low = torch.randn(n), torch.empty(n), torch.randn(n).bfloat16()
    found = [copy_contender(8 * n)]
    for name in ("e4m3", "e5m2"):
        q = dsx_ops.quantize_fp8(x, format=name)
        found += [
            Contender(f"dsx quantize {name}", 5.02 * n, lambda q=q, f=name: dsx_ops.quantize_fp8(x, format=f, out=q)),
            Contender(
                f"dsx dequantize {name}", 5.02 * n, lambda q=q, f=name: dsx_ops.dequantize_fp8(q, n, format=f, out=out)
            ),
        ]
    q, low_out = dsx_ops.quantize(low), torch.empty(n, dtype=torch.bfloat16)
    found += [
        Contender("dsx quantize int8 from bf16", 3.02 * n, lambda: dsx_ops.quantize(low, out=q)),
        Contender("dsx dequantize int8 to bf16", 3.02 * n, lambda: dsx_ops.dequantize(q, n, out=low_out)),
    ]
    return judged(found)


def exchange(n: int) -> Job:
    """Swizzled quantisation and reduction of four ranks' int4 codes."""
    n -= n % (8 * 256)
    x = torch.randn(n)
    grid = {"nodes": 2, "devices": 4}
    q = swizzle_quantize(x, **grid)
    out = torch.empty(n // 4)
    nbytes = (0.5 + 4 / 256) * n
    found = [
        copy_contender(8 * n),
        Contender("dsx swizzle_quantize", 4.0 * n + nbytes, lambda: swizzle_quantize(x, out=q, **grid)),
        Contender(
            "dsx reduce_dequantize, 4 ranks",
            nbytes + 4.0 * n / 4,
            lambda: reduce_dequantize(q, ranks=4, numel=n // 4, out=out),
        ),
        Contender(
            "dsx reduce_quantize, 4 ranks",
            1.25 * nbytes,
            lambda: reduce_quantize(q, ranks=4, numel=n // 4),
        ),
    ]
    return judged(found)


def rows(n: int) -> Job:
    """Layer norm and softmax over rows of 1024, forward and backward, fp32."""
    x = torch.randn(n // 1024, 1024)
    grad, w, b = torch.randn_like(x), torch.randn(1024), torch.randn(1024)
    ops = torch.ops.dsx_ops
    _, mean, rstd = ops.layer_norm(x, w, b, 1e-5, False)
    mask = torch.zeros(1024)
    probabilities = dsx_ops.masked_softmax(x)
    found = [
        copy_contender(8 * n),
        Contender("dsx layer_norm", 8.0 * n, lambda: ops.layer_norm(x, w, b, 1e-5, False)),
        Contender("torch layer_norm", 8.0 * n, lambda: torch.nn.functional.layer_norm(x, (1024,), w, b)),
        Contender("dsx add_layer_norm", 16.0 * n, lambda: ops.add_layer_norm(x, grad, w, b, 1e-5)),
        Contender(
            "dsx layer_norm_backward", 12.0 * n, lambda: ops.layer_norm_backward(grad, x, mean, rstd, w, b, None, False)
        ),
        Contender(
            "torch layer_norm backward",
            12.0 * n,
            lambda: torch.ops.aten.native_layer_norm_backward(
                grad, x, [1024], mean[:, None], rstd[:, None], w, b, [True] * 3
            ),
        ),
        Contender("dsx masked_softmax", 8.0 * n, lambda: ops.masked_softmax(x, mask, 0.125)),
        Contender("torch softmax(x * scale + mask)", 8.0 * n, lambda: torch.softmax(x * 0.125 + mask, -1)),
        Contender("dsx softmax_backward", 12.0 * n, lambda: ops.softmax_backward(grad, probabilities, 0.125)),
    ]
    return judged(found)


def elementwise(n: int) -> Job:
    """Bias + GELU and bias + dropout + residual, forward and backward, rows of 4096, fp32."""
    x = torch.randn(n // 4096, 4096)
    grad, b = torch.randn_like(x), torch.randn(4096)
    ops = torch.ops.dsx_ops
    found = [
        copy_contender(8 * n),
        Contender("dsx bias_gelu tanh", 8.0 * n, lambda: ops.bias_gelu(x, b, True)),
        Contender("dsx bias_gelu exact", 8.0 * n, lambda: ops.bias_gelu(x, b, False)),
        Contender("torch gelu(x + bias) tanh", 8.0 * n, lambda: torch.nn.functional.gelu(x + b, approximate="tanh")),
        Contender("dsx bias_gelu_backward tanh", 12.0 * n, lambda: ops.bias_gelu_backward(grad, x, b, True)),
        Contender("dsx bias_gelu_backward exact", 12.0 * n, lambda: ops.bias_gelu_backward(grad, x, b, False)),
        Contender("dsx bias_dropout_residual", 12.0 * n, lambda: ops.bias_dropout_residual(x, b, grad, 0.1, 1, 0)),
        Contender("torch residual + dropout(x + bias)", 12.0 * n, lambda: grad + torch.dropout(x + b, 0.1, True)),
        Contender("dsx bias_grad", 8.0 * n, lambda: ops.bias_grad(grad, torch.float32, 0.1, 1, 0)),
    ]
    return judged(found)


def tokens(n: int) -> Job:
    """Half of the rows of 1024 gathered and scattered."""
    x = torch.randn(8, n // 8192, 1024)
    kept = x.shape[1] // 2
    indices = torch.stack([torch.randperm(x.shape[1])[:kept].sort().values for _ in range(8)])
    part = dsx_ops.token_gather(x, indices)
    rows_ = torch.arange(8)[:, None]
    found = [
        copy_contender(8 * n),
        Contender("dsx token_gather", 4.0 * n, lambda: dsx_ops.token_gather(x, indices)),
        Contender("torch x[rows, indices]", 4.0 * n, lambda: x[rows_, indices]),
        Contender("dsx token_scatter_", 4.0 * n, lambda: dsx_ops.token_scatter_(x, part, indices)),
        Contender("dsx norm and overflow check", 4.0 * n, lambda: dsx_ops.norm([x])),
        Contender("dsx scale_", 8.0 * n, lambda: dsx_ops.scale_([x], 1.0)),
    ]
    return judged(found)


JOBS = {
    "onebit": signs, "integers": integers, "fp8": floats, "exchange": exchange,
    "rows": rows, "elementwise": elementwise, "tokens": tokens,
}  # fmt: skip

if __name__ == "__main__":
    keep_memory()
    sys.exit(run_jobs(JOBS, __doc__, 16_000_000))
