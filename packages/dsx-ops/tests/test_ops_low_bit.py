"""States rounded stochastically: bf16 moments and 4-bit codes, held against float64."""

import copy

import dsx_ops
import pytest
import torch
from dsx_ops import low_bit, reference
from torch import nn


def rounded(p=None, **options):
    return dsx_ops.FusedAdam(
        [torch.zeros(1)] if p is None else p, state_dtype=torch.bfloat16, stochastic_rounding=True, **options
    )


KINDS = {"bf16": rounded, "4 bits": lambda p=None, **o: dsx_ops.Adam4bit([torch.zeros(1)] if p is None else p, **o)}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


def flat_run(optimizer, p, grads, *, offset=0):
    """A parameter and its state after steps with these gradients."""
    p, state = p.clone(), optimizer.new_flat_state(p)
    for grad in grads:
        optimizer.step_flat(p, grad, state, offset=offset)
    return p, state


def tensors(state):
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("value", [1.0, -1.00390625 / 3, 3.14159e-5, -2.5e20, 1e-40, 65504.3])
def test_the_expectation_of_bf16_rounding_is_exact(value):
    """Over all 16 random bits the mean is the number itself, in float64, with no error at all."""
    bits = torch.arange(1 << 16)
    results = reference.rounded_to_bf16(torch.full((1 << 16,), value), bits).double()
    assert len(results.unique()) <= 2
    assert results.mean() == torch.tensor(value, dtype=torch.float32).double()


def test_bf16_rounding_keeps_what_is_no_number():
    given = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    for random in (0, 0xFFFF):
        got = reference.rounded_to_bf16(given, torch.full((5,), random))
        assert got[0].isnan() and got[1:].tolist() == given[1:].tolist() and got[4].signbit()


def test_the_expectation_of_codes_is_the_moment():
    """Over all random numbers k / 4096 the mean is the moment, to half a step of k."""
    torch.manual_seed(0)
    m, v = torch.randn(128), torch.rand(128).square()
    v[v < v.max() / 200] = v.max() / 200  # below the smallest level is the next test
    total = [torch.zeros(128, dtype=torch.float64) for _ in range(2)]
    for k in range(4096):
        u = torch.full((128,), (k + 0.5) / 4096)
        found = low_bit.decode4(*low_bit.encode4(m, v, (u, u)))
        for sum_, moment in zip(total, found):
            sum_ += moment
    first, second = low_bit.levels4(m.device)
    for sum_, moment, table in zip(total, (m, v), (first, second)):
        step = table.diff().max().item() * moment.abs().max().item()
        assert (sum_ / 4096 - moment).abs().max() <= step / 4096


def test_what_codes_stand_for_does_not_move_and_small_second_moments_stay_above_zero():
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    codes[::128] = 0x7F  # the largest of each block is its scale
    scales = (torch.tensor([2.0, 0.5]), torch.tensor([4.0, 0.25]))
    m, v = low_bit.decode4(codes, scales)
    assert (v > 0).all() and m.abs().max() == 2.0 and v.max() == 4.0
    half = torch.full((256,), 0.5)
    again, same = low_bit.encode4(m, v, (half, half))
    assert [s.tolist() for s in same] == [s.tolist() for s in scales]
    got = low_bit.decode4(again, same)
    assert torch.equal(got[0], m) and torch.equal(got[1], v)
    _, tiny = low_bit.decode4(*low_bit.encode4(m, torch.where(v < 1, 1e-20, v), (half, half)))
    assert tiny.min() > 0


def adam64(p, m, v, grad, step, lr=1e-2, eps=1e-8, decay=0.0):
    """One AdamW step in float64."""
    p, m, v, grad = (x.double() for x in (p, m, v, grad))
    m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
    root = (v / (1 - 0.999**step)).sqrt() + eps
    return p * (1 - lr * decay) - lr * m / (1 - 0.9**step) / root, m, v


def moments_of(state):
    if "moments" in state:
        return low_bit.decode4(state["moments"], (state["scale_avg"], state["scale_avg_sq"]))
    return state["exp_avg"].float(), state["exp_avg_sq"].float()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("numel", [1, 127, 128, 700])
def test_each_step_is_adams_on_the_rounded_states(kind, numel, decay):
    """The oracle in float64 starts each step from what the kept states stand for; what is kept is next to it."""
    torch.manual_seed(0)
    optimizer = kind(lr=1e-2, weight_decay=decay)
    p = torch.randn(numel)
    state = optimizer.new_flat_state(p)
    for step in range(1, 6):
        grad = torch.randn(numel) * 10 ** torch.randn(numel)
        expected, m, v = adam64(p, *moments_of(state), grad, step, decay=decay)
        optimizer.step_flat(p, grad, state)
        torch.testing.assert_close(p.double(), expected, rtol=1e-6, atol=1e-7)
        for got, exact, parts in zip(moments_of(state), (m, v), low_bit.levels4(p.device)):
            if "moments" not in state:
                assert ((got - exact).abs() <= 2.0**-7 * exact.abs()).all()
                continue
            blocks = torch.nn.functional.pad(exact.abs(), (0, -numel % 128)).view(-1, 128).amax(1)
            torch.testing.assert_close(
                torch.nn.functional.pad(got.abs().double(), (0, -numel % 128)).view(-1, 128).amax(1),
                blocks,
                rtol=1e-6,
                atol=0,
            )
            gap = parts.diff().max().item() * blocks.repeat_interleave(128)[:numel]
            assert ((got - exact).abs() <= gap * (1 + 1e-6)).all()


def test_pieces_give_the_bits_of_the_whole(kind):
    torch.manual_seed(0)
    p, grads = torch.randn(1000), [torch.randn(1000) for _ in range(4)]
    expected, state = flat_run(kind(lr=1e-2, seed=5), p, grads)
    for cut in (128, 512, 896):
        found = [flat_run(kind(lr=1e-2, seed=5), part, [g[s] for g in grads], offset=s.start or 0)
                 for part, s in ((p[:cut], slice(0, cut)), (p[cut:], slice(cut, None)))]  # fmt: skip
        assert torch.equal(torch.cat([values for values, _ in found]), expected)
        for key, whole in tensors(state).items():
            assert torch.equal(torch.cat([held[key] for _, held in found]), whole), key
    other, _ = flat_run(kind(lr=1e-2, seed=6), p, grads)
    assert not torch.equal(other, expected)


def test_long_tensors_are_worked_on_in_pieces_with_the_same_bits(kind, monkeypatch):
    torch.manual_seed(0)
    p, grads = torch.randn(3000), [torch.randn(3000) for _ in range(3)]
    expected, state = flat_run(kind(), p, grads)
    monkeypatch.setattr(reference, "PIECE", 1024)
    got, other = flat_run(kind(), p, grads)
    assert torch.equal(got, expected) and all(torch.equal(other[k], v) for k, v in tensors(state).items())


def test_small_changes_of_a_second_moment_add_up(kind):
    """Rounded to nearest, a bf16 EMA that changes by a thousandth per step stands still."""
    count, p = 4096, torch.zeros(4096)
    grads = [torch.ones(count)] * 1 + [torch.cat([torch.ones(count // 2), torch.full((count // 2,), 0.5)])] * 700
    _, state = flat_run(kind(lr=0.0), p, grads)
    exact = torch.zeros(count, dtype=torch.float64)
    for grad in grads:
        exact = 0.999 * exact + 0.001 * grad.double() ** 2
    got = moments_of(state)[1].double()
    for half in (slice(0, count // 2), slice(count // 2, None)):
        assert abs(got[half].mean() / exact[half].mean() - 1) < 0.03
    still = torch.ones((), dtype=torch.bfloat16) * 0.25
    assert still * 0.999 + 0.001 * 0.2 == still  # what stochastic rounding is for


def test_bf16_parameters_without_a_master_move_by_less_than_their_last_bit(kind):
    p = torch.ones(4096, dtype=torch.bfloat16)
    got, _ = flat_run(kind(lr=1e-4), p, [torch.ones(4096)] * 20)
    assert abs(got.double().mean() - (1 - 20e-4)) < 2e-4
    nearest = torch.optim.AdamW([still := nn.Parameter(p.clone())], lr=1e-4, weight_decay=0.0)
    for _ in range(20):
        still.grad = torch.ones_like(still)
        nearest.step()
    assert torch.equal(still.detach(), p)


def test_state_dicts_copies_and_memory_orders_continue_to_the_bit(kind):
    def after(steps, save_at=None):
        p = nn.Parameter(torch.linspace(-1, 1, 4 * 6 * 3 * 3).view(4, 6, 3, 3).to(memory_format=torch.channels_last))
        optimizer = kind([p], lr=1e-2, seed=3)
        for step in range(steps):
            if step == save_at:
                saved, optimizer = copy.deepcopy(optimizer).state_dict(), kind([p], lr=1e-2, seed=3)
                optimizer.load_state_dict(saved)
            p.grad = (p.detach() * 3).sin() + step
            optimizer.step()
        return p.detach()

    expected = after(6)
    got = after(6, save_at=3)
    assert torch.equal(got, expected)
    plain = nn.Parameter(torch.linspace(-1, 1, 216).view(4, 6, 3, 3))
    other = kind([plain], lr=1e-2, seed=3)
    for step in range(6):
        plain.grad = (plain.detach() * 3).sin() + step
        other.step()
    assert torch.equal(plain.detach(), expected)  # random bits belong to an element, wherever it lies


def test_bytes_of_the_state(kind):
    p = nn.Parameter(torch.randn(128 * 40))
    p.grad = torch.randn_like(p)
    optimizer = kind([p])
    optimizer.step()
    held = sum(t.numel() * t.element_size() for t in tensors(optimizer.state[p]).values())
    assert held / p.numel() == (4 if "exp_avg" in optimizer.state[p] else 1 + 2 * 4 / 128)


def test_unscaling_skipping_and_copying(kind):
    torch.manual_seed(0)
    p, grad = torch.randn(300), torch.randn(300)
    a, b = (nn.Parameter(p.clone()) for _ in range(2))
    first, second = kind([a]), kind([b])
    a.grad, b.grad, copied = grad * 1024, grad.clone(), torch.zeros(300, dtype=torch.bfloat16)
    first.step(found_inf=torch.ones(()))
    assert torch.equal(a.detach(), p) and not first.state[a]
    first.step(grad_scale=1024.0, copy_out={a: copied}, found_inf=torch.zeros(()))
    second.step()
    assert torch.equal(a, b) and torch.equal(copied, a.detach().bfloat16()) and first.state[a]["step"] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_spoils_its_block_and_no_other(bad):
    generator = torch.Generator().manual_seed(3)
    p, grads = torch.randn(400, generator=generator), [torch.randn(400, generator=generator) for _ in range(3)]
    clean, _ = flat_run(dsx_ops.Adam4bit([torch.zeros(1)]), p, grads)
    grads[1][200] = bad
    got, state = flat_run(dsx_ops.Adam4bit([torch.zeros(1)]), p, grads)
    assert got[128:256].isnan().all() and state["scale_avg"].isnan().tolist() == [False, True, False, False]
    assert torch.equal(got[:128], clean[:128]) and torch.equal(got[256:], clean[256:])


def test_mistakes_are_named():
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    with pytest.raises(dsx_ops.errors.TensorError, match=r"stochastic_rounding: got moments in float32.*state_dtype"):
        dsx_ops.FusedAdam([p], stochastic_rounding=True).step()
    with pytest.raises(dsx_ops.errors.TensorError, match="multiple of 128"):
        four = dsx_ops.Adam4bit([p])
        four.step_flat(torch.zeros(8), torch.zeros(8), four.new_flat_state(torch.zeros(8)), offset=64)
    with pytest.raises(dsx_ops.errors.TensorError, match="expected 4-bit moments"):
        saved = dsx_ops.FusedAdam([p])
        saved.step()
        dsx_ops.Adam4bit([p]).load_state_dict(saved.state_dict())
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="rounded at random or in codes"):
        optimizer = rounded()
        _, state = flat_run(optimizer, torch.zeros(4), [torch.ones(4)])
        optimizer.rollback_flat(torch.zeros(4), torch.ones(4), state)


class GPT(nn.Module):
    """One causal transformer layer over 16 tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 32), nn.Embedding(24, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.layer(self.tokens(x) + self.places.weight[: x.shape[1]], src_mask=mask, is_causal=True)
        return self.head(hidden)


def loss_of_gpt(make, dtype=torch.float32, steps=300):
    """Mean loss of the last 50 steps. The next token is a function of the two before it."""
    torch.manual_seed(0)
    table, net = torch.randint(16, (16, 16)), GPT()
    low = {n: nn.Parameter(p.detach().to(dtype)) for n, p in net.named_parameters()}
    optimizer, generator, total = make(low.values()), torch.Generator().manual_seed(1), 0.0
    for step in range(steps):
        rows = list(torch.randint(16, (2, 8), generator=generator))
        for _ in range(22):
            rows.append(torch.where(torch.rand(8, generator=generator) < 0.05, rows[-1], table[rows[-2], rows[-1]]))
        x = torch.stack(rows, 1)
        logits = torch.func.functional_call(net, {n: p.float() for n, p in low.items()}, x[:, :-1])
        loss = nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), x[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() if step >= steps - 50 else 0.0
    return total / 50


def test_a_small_gpt_learns_as_with_exact_states():
    exact = loss_of_gpt(lambda p: torch.optim.AdamW(p, lr=5e-3, weight_decay=0.0))
    way = loss_of_gpt(lambda p: torch.optim.SGD(p, lr=0.0)) - exact
    gaps = {name: (loss_of_gpt(lambda p, of=of: of(list(p), lr=5e-3)) - exact) / way for name, of in KINDS.items()}
    gaps["4 bits, bf16"] = (loss_of_gpt(lambda p: dsx_ops.Adam4bit(p, lr=5e-3), torch.bfloat16) - exact) / way
    assert way > 1.0, (exact, way)
    assert all(gap < 0.01 for gap in gaps.values()), gaps
