"""Which way attention is computed: torch's fused kernels on CUDA too, unless they cannot or a fixed order is asked
for.
"""

import pytest
import torch
from dsx_ops.transformer import attention as module
from dsx_ops.transformer.attention import Way, attention, choose_way
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture
def able(monkeypatch):
    """Says which of torch's kernels would take the tensors; there need be no GPU."""

    def say(*names):
        for name in ("flash", "efficient", "cudnn"):
            monkeypatch.setattr(module.cuda, f"can_use_{name}_attention", lambda params, name=name: name in names)

    return say


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def cuda_tensors(trains=True):
    return [torch.empty(2, 4, 16, 8, device="cuda", requires_grad=trains) for _ in range(3)]


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_training_on_cuda_is_fused_when_a_kernel_takes_it(able, kernel, p):
    able(kernel)
    with FakeTensorMode():
        assert choose_way(*cuda_tensors(), None, p, False) is Way.FUSED


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_explicit_when_none_takes_it(able, p):
    able()
    with FakeTensorMode():
        assert choose_way(*cuda_tensors(), None, p, False) is Way.EXPLICIT
        assert choose_way(*cuda_tensors(), None, p, True) is Way.EXPLICIT


def test_without_gradients_and_dropout_no_kernel_is_asked_for(able):
    able()
    with FakeTensorMode():
        assert choose_way(*cuda_tensors(trains=False), None, 0.0, False) is Way.FUSED
        with torch.no_grad():
            assert choose_way(*cuda_tensors(), None, 0.0, False) is Way.FUSED


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_fixed_order_is_kept_where_torch_asks_for_it(able, deterministic, p):
    with FakeTensorMode():
        able("flash", "efficient")
        assert choose_way(*cuda_tensors(), None, p, False) is Way.FLASH
        able("efficient", "cudnn")
        assert choose_way(*cuda_tensors(), None, p, False) is Way.EXPLICIT
        assert choose_way(*cuda_tensors(), None, p, True) is Way.FUSED  # stochastic_mode


def test_on_the_cpu_dropout_alone_makes_it_explicit(able):
    able()
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    assert choose_way(q, k, v, None, 0.0, False) is Way.FUSED
    assert choose_way(q, k, v, None, 0.1, False) is Way.EXPLICIT


def test_the_fused_call_gets_dropout_mask_and_scale(able, monkeypatch):
    seen = []

    def watch(query, key, value, attn_mask, dropout_p, scale):
        seen.append((attn_mask.dtype, dropout_p, scale))
        return query

    monkeypatch.setattr(module, "scaled_dot_product_attention", watch)
    able("efficient")
    with FakeTensorMode():
        added = torch.zeros(2, 1, 1, 16, device="cuda", dtype=torch.float16)
        attention(*cuda_tensors(), added, p=0.1)
    assert seen == [(torch.float32, 0.1, 8**-0.5)]
