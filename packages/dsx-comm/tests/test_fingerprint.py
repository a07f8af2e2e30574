"""Fingerprints of tensors."""

import pytest
import torch
from dsx_comm.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("start", [0, 1])
def test_a_fingerprint_sees_every_bit_and_the_order(dtype, start):
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.arange(size * 13, dtype=torch.uint8)
    tensor = raw.view(dtype)[start:]
    before = fingerprint(tensor)
    for bit in range(start * size * 8, raw.numel() * 8):
        raw[bit // 8] ^= 1 << bit % 8
        assert fingerprint(tensor) != before, bit
        raw[bit // 8] ^= 1 << bit % 8
    assert fingerprint(tensor) == before != fingerprint(tensor.flip(0))
    assert fingerprint(tensor[:0]) == 0


def test_a_fingerprint_sees_changes_far_apart():
    tensor = torch.zeros(400_000)
    seen = {fingerprint(tensor)}
    for place in (0, 1, 131_071, 131_072, 262_144, 399_999):
        tensor[place] = 1
        seen.add(fingerprint(tensor))
    assert len(seen) == 7
