"""Offsets beyond 2^31 bytes and elements, over memory that is only reserved: pages that were never written read as zero
and cost nothing.
"""

import mmap

import dsx_ops
import pytest
import torch
from dsx_ops import native, onebit

pytestmark = pytest.mark.skipif(native.module() is None, reason="checks the arithmetic of the compiled kernels")


def reserved(count, dtype):
    """`count` zeros that take no memory until they are written."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)


def test_tokens_far_beyond_two_gigabytes():
    hidden, sequence = 256, 2**23 + 1000  # 2^31 elements and some, of one byte
    x = reserved(hidden * sequence, torch.uint8).view(1, sequence, hidden)
    far = [0, 2**22, 2**23 - 1, 2**23, sequence - 1]
    part = torch.arange(5, dtype=torch.uint8).view(1, 5, 1).expand(1, 5, hidden).contiguous()
    indices = torch.tensor([far])
    dsx_ops.token_scatter_(x, part, indices)
    assert [x[0, i, -1].item() for i in far] == [0, 1, 2, 3, 4]
    assert torch.equal(dsx_ops.token_gather(x, indices), part)
    assert not x[0, 2**22 - 1].any() and not x[0, 2**23 + 1].any()


def test_sums_and_signs_beyond_two_gigabytes():
    x = reserved(2**29 + 100, torch.float32)  # 2 GiB + 400 bytes
    x[-1], x[2**29] = -3.0, 4.0
    assert dsx_ops.norm([x]).norm == 5.0
    packed = onebit.pack_signs(x)
    assert packed[2**26 :].tolist() == [255] * 12 + [7], (
        "the last of the hundred is negative, the rest of its byte empty"
    )
    assert packed[: 2**26].eq(255).all()
