"""8-bit Adam: its codes, its size, and a real training run beside fp32 states."""

import dsx_ops
import pytest
import torch
from dsx_ops import native, reference
from torch import nn

CODES_AND_SCALES = ("exp_avg", "exp_avg_sq", "scale_avg", "scale_avg_sq")
UNITS = ((reference.FIRST_UNIT, 127), (reference.SECOND_UNIT, 255))


@pytest.mark.parametrize("unit,largest", UNITS)
def test_codes_decode_to_what_they_encode(unit, largest):
    values = reference.decode8(torch.arange(largest + 1), unit)
    assert values[0] == 0 and values[-1] == reference.LARGEST_CODE and (values.diff() > 0).all()
    assert (values[9:] / values[8:-1]).max() <= 1.1251  # steps of at most an eighth
    assert torch.equal(values[:9], values[8] * torch.arange(9) / 8)  # and below them of equal size, down to zero
    for random in (0, 2**20 - 1):  # exact values do not move, whatever the noise
        noise = torch.full((largest + 1,), random, dtype=torch.int64)
        assert torch.equal(reference.encode8(values / unit, noise), torch.arange(largest + 1))


@pytest.mark.parametrize("magnitude", [1e-7, 1e-6, 3e-3, 0.3, 0.999])
def test_rounding_is_unbiased(magnitude):
    random, unit = reference.pair_noise(5, 0, 1 << 18, torch.device("cpu")), reference.FIRST_UNIT
    for noise in (random[0::2] >> 12, random[1::2] & 0xFFFFF):  # of even and of odd elements
        code = reference.encode8(torch.full(noise.shape, magnitude) / unit, noise)
        values = reference.decode8(code, unit).double()
        below, above = values.min().item(), values.max().item()
        assert below <= magnitude <= above and code.max() - code.min() == 1
        spread = ((magnitude - below) * (above - magnitude)) ** 0.5  # standard deviation of one
        assert abs(values.mean().item() - magnitude) < 4.5 * spread / noise.numel() ** 0.5


def test_noise_is_even_and_independent():
    """Of neighbours, blocks, steps, and of what an element uses for moments and parameter."""
    count = 1 << 18

    def parts(seed, offset):
        random = reference.pair_noise(seed, offset, count, torch.device("cpu")).double()
        integer = random.long()
        moments = torch.where(torch.arange(count) % 2 == 1, integer & 0xFFFFF, integer >> 12) / 2**20
        weights = torch.where(torch.arange(count) % 2 == 1, integer >> 16, integer & 0xFFFF) / 2**16
        return moments, weights

    moments, weights = parts(7, 0)
    for part in (moments[0::2], moments[1::2], weights[0::2], weights[1::2]):
        filled = torch.histc(part, 64, 0, 1)
        assert ((filled - filled.mean()) ** 2 / filled.mean()).sum() < 63 + 5 * (2 * 63) ** 0.5
    others = {
        "the next pair": (moments[:-2], moments[2:]),
        "the other of a pair": (moments[0::2], moments[1::2]),
        "the parameters of a pair": (weights[0::2], weights[1::2]),
        "the next block": (moments[:-256], moments[256:]),
        "moment and parameter": (moments, weights),
        "another seed": (moments, parts(8, 0)[0]),
        "beyond 2^40": (moments, parts(7, 2**40)[0]),
    }
    for name, (a, b) in others.items():
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / a.numel() ** 0.5, name


def flat_run(p, grads, **options):
    """A parameter and its state after steps with these gradients."""
    optimizer = dsx_ops.Adam8bit([torch.zeros(1)], **options)
    p, state = p.clone(), optimizer.new_flat_state(p)
    for grad in grads:
        optimizer.step_flat(p, grad, state)
    return p, state


def moments_of(state):
    """The fp32 moments that codes and scales stand for."""
    first, second = state["exp_avg"].int(), state["exp_avg_sq"].int()
    m = reference.decode8(first & 0x7F, reference.FIRST_UNIT) * torch.where(first < 128, 1.0, -1.0)
    v = reference.decode8(second, reference.SECOND_UNIT)
    scales = [
        state[k].repeat_interleave(256)[: m.numel()] / reference.LARGEST_CODE for k in ("scale_avg", "scale_avg_sq")
    ]
    return m * scales[0], v * scales[1]


def test_moments_follow_those_of_adam():
    generator = torch.Generator().manual_seed(0)
    count, spread = 1 << 16, 10 ** torch.linspace(-3, 0, 256).repeat(256)  # in every block from 0.001 to 1
    grads = [torch.randn(count, generator=generator) * spread for _ in range(30)]
    _, state = flat_run(torch.zeros(count), grads)
    m, v = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for grad in grads:
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.double() ** 2
    m8, v8 = moments_of(state)
    for got, expected in ((m8, m), (v8, v)):  # alike in every column of blocks, and on average over all of them
        ratio = (got * expected).view(256, 256).sum(0) / (expected**2).view(256, 256).sum(0)
        assert (ratio - 1).abs().max() < 0.05 and abs(ratio.mean() - 1) < 2e-3
        assert ((got - expected).view(256, 256).norm(dim=0) / expected.view(256, 256).norm(dim=0)).max() < 0.25


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "adam_w_mode": False}], ids=str)
def test_a_first_step_is_adams(options):
    torch.manual_seed(0)
    p, grad = torch.randn(1000), torch.randn(1000)
    expected = nn.Parameter(p.double().clone())
    expected.grad = grad.double()
    kind = torch.optim.AdamW if options.get("adam_w_mode", True) else torch.optim.Adam
    kind([expected], lr=1e-2, weight_decay=options.get("weight_decay", 0.0)).step()
    got, _ = flat_run(p, [grad], lr=1e-2, **options)
    torch.testing.assert_close(got.double(), expected.detach(), rtol=1e-6, atol=1e-7)


def test_a_rate_of_zero_keeps_parameters_and_feeds_the_moments():
    torch.manual_seed(0)
    p = torch.cat([torch.randn(600), torch.zeros(100)])
    got, state = flat_run(p, [torch.randn(700)], lr=0.0)
    assert torch.equal(got, p) and moments_of(state)[0].abs().sum() > 10


@pytest.mark.native
@pytest.mark.parametrize("magnitude", [1e-38, 1e-25, 1e-12, 1e3, 3e4, 1e5, 1e9, 1e17, 1e25])
def test_extreme_gradients_give_the_same_bits_everywhere(magnitude):
    generator = torch.Generator().manual_seed(3)
    p = torch.randn(1000, generator=generator)
    grads = [torch.randn(1000, generator=generator) * m for m in (magnitude, 1.0, magnitude)]
    with dsx_ops.reference_only():
        expected, state = flat_run(p, grads, lr=1e-2)
    if 1e-12 <= magnitude <= 1e17:
        assert (expected - p).abs().max() < 0.1 and moments_of(state)[1].max() > 0
    for isa in each_isa():
        got, other = flat_run(p, grads, lr=1e-2)
        assert same(got, expected) and all(same(state[k], other[k]) for k in CODES_AND_SCALES), isa


def same(a, b):
    """Equal bits; any NaN equals any NaN."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


def each_isa():
    """Every instruction set in turn; the usual one afterwards."""
    module = native.module()
    if module is None:
        pytest.skip("needs the compiled module")
    usual = module.isa()
    try:
        for isa in module.isas():
            module.set_isa(isa)
            yield isa
    finally:
        module.set_isa(usual)


@pytest.mark.native
@pytest.mark.skipif(native.module() is None, reason="plain PyTorch follows the mode it is in")
@pytest.mark.parametrize("threads", [1, 2])
def test_small_moments_survive_where_denormal_numbers_are_flushed(threads):
    def run(flush):
        p = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
        optimizer = dsx_ops.Adam8bit([p])
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            spread = 5 * torch.randn(p.shape, generator=generator)
            p.grad = spread.exp().bfloat16()  # most are far below the block's largest
            torch.set_flush_denormal(flush)
            try:
                optimizer.step()
            finally:
                torch.set_flush_denormal(False)
        return p.detach(), optimizer.state[p]["exp_avg"]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kept, flushed in zip(run(False), run(True), strict=True):
            assert torch.equal(kept, flushed)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_spoils_its_block_and_no_other(bad, dtype):
    generator = torch.Generator().manual_seed(3)
    p = torch.randn(700, generator=generator).to(dtype)
    grads = [torch.randn(700, generator=generator).to(dtype) for _ in range(3)]
    clean, _ = flat_run(p, grads)
    grads[1][300] = bad
    with dsx_ops.reference_only():
        expected, state = flat_run(p, grads)
    assert expected[256:512].isnan().all() and state["scale_avg"].isnan().tolist() == [False, True, False]
    for isa in each_isa():
        got, other = flat_run(p, grads)
        assert torch.equal(got[:256], clean[:256]) and torch.equal(got[512:], clean[512:]), isa
        assert same(got, expected) and all(same(state[k], other[k]) for k in CODES_AND_SCALES), isa


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
    with pytest.raises(dsx_ops.errors.TensorError, match="8-bit"):
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
    with pytest.raises(dsx_ops.errors.TensorError, match="multiple of 256"):
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
