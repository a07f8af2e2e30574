"""8-bit Adam: its codes, its size, and a real training run beside fp32 states."""

import dsx_ops
import pytest
import torch
from dsx_ops import reference
from torch import nn


def test_codes_decode_to_what_they_encode():
    for codes in (reference.FIRST_CODES, reference.SECOND_CODES):
        values = reference.decode8(torch.arange(codes + 1), codes)
        assert values[0] == 0 and values[-1] == 1 and (values.diff() > 0).all()
        assert (values[2:] / values[1:-1]).max() <= 1.1251  # steps of at most an eighth
        for random in (0, 2**20 - 1):  # exact values do not move, whatever the noise
            noise = torch.full((codes,), random, dtype=torch.int64)
            assert torch.equal(reference.encode8(values[1:], noise, codes), torch.arange(1, codes + 1))


@pytest.mark.parametrize("magnitude", [1e-6, 3e-3, 0.3, 0.999])
def test_rounding_is_unbiased(magnitude):
    random, _ = reference.noise(5, 0, 1 << 18, torch.device("cpu"))
    code = reference.encode8(torch.full((1 << 18,), magnitude), random >> 12, reference.FIRST_CODES)
    mean = reference.decode8(code, reference.FIRST_CODES).double().mean().item()
    assert mean == pytest.approx(magnitude, rel=2e-2 if magnitude < 1e-5 else 5e-4)


def test_states_take_two_bytes_per_parameter():
    p = nn.Parameter(torch.randn(256 * 40))
    p.grad = torch.randn(256 * 40)
    optimizer = dsx_ops.Adam8bit([p])
    optimizer.step()
    held = sum(t.numel() * t.element_size() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))
    assert held / p.numel() == 2 + 2 * 4 / 256


def test_state_dict_continues_to_the_bit():
    a, b = (nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(2))
    first, second = dsx_ops.Adam8bit([a], seed=3), dsx_ops.Adam8bit([b], seed=3)
    for step in range(6):
        if step == 3:
            saved = second.state_dict()
            second = dsx_ops.Adam8bit([b], seed=3)
            second.load_state_dict(saved)
        for p, o in ((a, first), (b, second)):
            p.grad = (p.detach() * 3).sin() + step
            o.step()
    assert torch.equal(a, b)
    with pytest.raises(dsx_ops.TensorError, match="8-bit"):
        second.load_state_dict(
            torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict() | {"state": {0: {"step": 1}}}
        )


def test_offsets_key_the_noise_and_must_fit_the_blocks():
    optimizer = dsx_ops.Adam8bit([torch.zeros(1)], lr=1e-2)
    outcomes = []
    for offset in (0, 256, 2**32, 2**40):
        p = torch.linspace(-1, 1, 512)
        state = optimizer.new_flat_state(p)
        for _ in range(2):
            optimizer.step_flat(p, p * 0.37, state, offset=offset)
        outcomes.append(state["exp_avg"])
    assert all(not torch.equal(a, b) for i, a in enumerate(outcomes) for b in outcomes[:i])
    with pytest.raises(dsx_ops.TensorError, match="multiple of 256"):
        optimizer.step_flat(p, p, state, offset=100)


def train(optimizer_of, dtype, steps=300):
    """Loss over the last steps of a small network on a fixed task."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    target = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    low = [nn.Parameter(p.detach().to(dtype)) for p in net.parameters()]
    optimizer = optimizer_of(low)
    names = [n for n, _ in net.named_parameters()]
    total, generator = 0.0, torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(64, 16, generator=generator)
        values = {n: p.float() for n, p in zip(names, low)}
        loss = (torch.func.functional_call(net, values, x) - target(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() if step >= steps - 50 else 0.0
    return total / 50


def test_training_is_as_good_as_with_fp32_states():
    exact = train(lambda p: torch.optim.AdamW(p, lr=3e-3), torch.float32)
    coarse = train(lambda p: dsx_ops.Adam8bit(p, lr=3e-3), torch.float32)
    bf16 = train(lambda p: dsx_ops.Adam8bit(p, lr=3e-3), torch.bfloat16)
    untrained = train(lambda p: dsx_ops.Adam8bit(p, lr=0.0), torch.float32)
    assert exact < untrained / 4
    # On a loss this small relative gaps are large: what matters is the part of the way that was covered.
    assert (coarse - exact) / (untrained - exact) < 0.01
    assert (bf16 - exact) / (untrained - exact) < 0.02
