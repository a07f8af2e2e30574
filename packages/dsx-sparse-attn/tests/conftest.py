"""Fixtures of the attention tests: random problems, and the dense float64 oracle they are held against."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from dsx_sparse_attn import block_sparse_attention, reference
from dsx_sparse_attn.attention import Options, checked


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)).item()


@dataclass
class Problem:
    """One random attention problem; `run` gives output and gradients, `oracle` the dense float64 ones."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: torch.Tensor
    dout: torch.Tensor
    block: int
    options: dict = field(default_factory=dict)

    def results(self, attend, dtype):
        q, k, v = (t.to(dtype).requires_grad_() for t in (self.q, self.k, self.v))
        inputs, options = [q, k, v], dict(self.options)
        if "rpe" in options:
            options["rpe"] = options["rpe"].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
            inputs.append(options["rpe"])
        out = attend(q, k, v, options)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.dout.to(dtype))]

    def run(self, backend):
        return self.results(
            lambda q, k, v, o: block_sparse_attention(q, k, v, self.layout, block=self.block, backend=backend, **o),
            self.q.dtype,
        )

    def oracle(self):
        def attend(q, k, v, options):
            call = checked(q, k, v, self.layout, Options(block=self.block, **options))
            return reference.dense_attention(call)

        return self.results(attend, torch.float64)

    def errors(self, backend):
        """Largest relative error of output and every gradient."""
        return [relative(a, b) for a, b in zip(self.run(backend), self.oracle(), strict=True)]


@pytest.fixture
def problem():
    def make(
        batch=1, heads=2, kv_heads=None, seq=128, dim=32, block=16, dtype=torch.float32, density=0.4, seed=0, **options
    ):
        g = torch.Generator().manual_seed(seed)
        blocks = -(-seq // block)
        layout = (torch.rand(heads, blocks, blocks, generator=g) < density).long()
        layout[:, torch.arange(blocks), torch.arange(blocks)] = 1
        shape, kv = (batch, heads, seq, dim), (batch, kv_heads or heads, seq, dim)
        q, k, v, dout = (torch.randn(s, generator=g).to(dtype) for s in (shape, kv, kv, shape))
        return Problem(q, k, v, layout, dout, block, options)

    return make


@pytest.fixture
def vary():
    return replace
