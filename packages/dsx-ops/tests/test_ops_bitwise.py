"""Elementwise kernels give the same bits for every instruction set, thread count and split, and as the PyTorch
reference.
"""

import itertools

import dsx_ops
import pytest
import torch
from dsx_ops import native

pytestmark = pytest.mark.native
module = native.module()
if module is None:
    pytest.skip("needs the compiled module", allow_module_level=True)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 513, 4097, 40000)

RULES = {
    "adam": lambda ps, **k: dsx_ops.FusedAdam(ps, lr=1e-2, weight_decay=0.1, adam_w_mode=False, **k),
    "adamw": lambda ps, **k: dsx_ops.FusedAdam(ps, lr=1e-2, weight_decay=0.1, **k),
    "adam_plain": lambda ps, **k: dsx_ops.FusedAdam(ps, lr=1e-2, bias_correction=False, maximize=True, **k),
    "adagrad": lambda ps, **k: dsx_ops.CPUAdagrad(ps, weight_decay=0.1, fp32_optimizer_states=bool(k)),
    "lion": lambda ps, **k: dsx_ops.FusedLion(ps, lr=1e-2, weight_decay=0.1, **k),
    "sgd": lambda ps, **k: dsx_ops.SGD(ps, lr=1e-2),
    "sgdm": lambda ps, **k: dsx_ops.SGD(ps, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, **k),
    "nesterov": lambda ps, **k: dsx_ops.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, **k),
    "adam8": lambda ps, **k: dsx_ops.Adam8bit(ps, lr=1e-2, weight_decay=0.1, seed=7),
}


@pytest.fixture(autouse=True)
def _restore():
    isa, threads = module.isa(), torch.get_num_threads()
    yield
    module.set_isa(isa)
    module.set_own_threads(False)
    torch.set_num_threads(threads)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit patterns; any NaN equals any NaN."""
    if a.dtype.is_floating_point:
        return bool(((a == b) | (a.isnan() & b.isnan())).all()) and torch.equal(
            a.signbit()[a == 0], b.signbit()[b == 0]
        )
    return torch.equal(a, b)


def train(make, dtype, grad_dtype, steps=3, sizes=SIZES, **options):
    """Parameters, states and copies after a few steps on reproducible data."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    optimizer = make(params, **options)
    copies = {p: torch.empty(p.numel(), dtype=torch.bfloat16) for p in params}
    for _ in range(steps):
        for p in params:
            p.grad = None
            grad = torch.randn(p.numel(), generator=generator) * 8
            if grad_dtype == dtype:
                p.grad = grad.to(grad_dtype)
            else:
                object.__setattr__(p, "grad", grad.to(dtype))
        optimizer.step(grad_scale=3.0, copy_out=copies)
    state = [t for p in params for _, t in sorted(optimizer.state[p].items()) if isinstance(t, torch.Tensor)]
    return params + state + list(copies.values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_instruction_set_and_the_reference_agree(rule, dtype):
    options = {} if rule in ("sgd", "adam8") else {"state_dtype": torch.float32}
    with dsx_ops.reference_only():
        expected = train(RULES[rule], dtype, dtype, **options)
    for isa, threads, own in itertools.product(module.isas(), (1, 3), (False, True)):
        module.set_isa(isa)
        torch.set_num_threads(threads)
        module.set_own_threads(own)
        for i, (a, b) in enumerate(zip(expected, train(RULES[rule], dtype, dtype, **options))):
            assert same(a, b), f"{rule} {dtype} {isa} threads={threads} own={own}: tensor {i}"


@pytest.mark.parametrize("rule", [r for r in RULES if r not in ("sgd", "adam8")])
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_low_precision_states_agree(rule, dtype):
    with dsx_ops.reference_only():
        expected = train(RULES[rule], dtype, dtype, sizes=(0, 77, 5000))
    for isa in module.isas():
        module.set_isa(isa)
        for a, b in zip(expected, train(RULES[rule], dtype, dtype, sizes=(0, 77, 5000))):
            assert same(a, b), (rule, isa)


@pytest.mark.parametrize("p_dtype,g_dtype,s_dtype", list(itertools.product(FLOATS, FLOATS, FLOATS)), ids=str)
def test_every_combination_of_dtypes(p_dtype, g_dtype, s_dtype):
    def run():
        generator = torch.Generator().manual_seed(2)
        p = torch.randn(1037, generator=generator).to(p_dtype)
        optimizer = dsx_ops.FusedAdam([torch.zeros(1)], lr=1e-2, weight_decay=0.1, state_dtype=s_dtype)
        state = optimizer.new_flat_state(p)
        copy = torch.empty(1037, dtype=torch.float16)
        for _ in range(3):
            grad = torch.randn(1037, generator=generator).to(g_dtype)
            optimizer.step_flat(p, grad, state, grad_scale=1.7, copy_out=copy)
        return p, state["exp_avg"], state["exp_avg_sq"], copy

    with dsx_ops.reference_only():
        expected = run()
    for isa in module.isas():
        module.set_isa(isa)
        assert all(same(a, b) for a, b in zip(expected, run())), isa


@pytest.mark.parametrize("rule", RULES)
def test_cutting_a_buffer_changes_nothing(rule):
    torch.manual_seed(0)
    whole, grad = torch.randn(10_000), torch.randn(10_000)
    optimizer = RULES[rule]([torch.zeros(1)])
    cuts = (0, 256, 3072, 3328, 9984, 10_000) if rule == "adam8" else (0, 1, 300, 4097, 4098, 9999, 10_000)
    pieces, state, parts = whole.clone(), optimizer.new_flat_state(whole), {}
    split = optimizer.new_flat_state(whole)
    for _ in range(3):
        optimizer.step_flat(whole, grad, state)
    for a, b in itertools.pairwise(cuts):
        part = {"step": 0}
        for key, value in split.items():
            if isinstance(value, torch.Tensor):
                part[key] = value[a // 256 : -(-b // 256)] if key.startswith("scale") else value[a:b]
        parts[a] = part
        for _ in range(3):
            optimizer.step_flat(pieces[a:b], grad[a:b], part, offset=a)
    assert same(whole, pieces)
    assert all(same(state[k], split[k]) for k in state if isinstance(state[k], torch.Tensor))


@pytest.mark.parametrize("to", (torch.bfloat16, torch.float16), ids=str)
def test_conversions_are_torchs_own(to):
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 65504, 65519.9, 65520, 1e-45, 6e-8, 2.98e-8]
    )
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    source = torch.cat([special, bits.view(torch.float32), torch.randn(999) * 1e-6, torch.randn(1001)])
    half = source.to(to)
    for isa in module.isas():
        module.set_isa(isa)
        down, up = torch.empty_like(half), torch.empty(half.numel())
        numbers = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
        module.convert(0, source.data_ptr(), numbers[to], down.data_ptr(), source.numel(), 1)
        module.convert(numbers[to], half.data_ptr(), 0, up.data_ptr(), half.numel(), 1)
        assert same(down, half), isa
        assert same(up, half.float()), isa


def test_misaligned_addresses():
    torch.manual_seed(0)
    expected = None
    for shift in range(5):
        buffer, g = torch.zeros(2000), torch.zeros(2000, dtype=torch.bfloat16)
        copy = torch.zeros(2000, dtype=torch.bfloat16)
        p, grad, low = buffer[shift : shift + 1003], g[shift : shift + 1003], copy[shift : shift + 1003]
        p.copy_(torch.linspace(-1, 1, 1003))
        grad.copy_(torch.linspace(-3, 2, 1003))
        optimizer = dsx_ops.FusedAdam([torch.zeros(1)], lr=1e-2)
        optimizer.step_flat(p, grad, optimizer.new_flat_state(p), copy_out=low)
        expected = p.clone() if expected is None else expected
        assert torch.equal(p, expected) and torch.equal(low, expected.bfloat16())
        assert not buffer[:shift].any() and not buffer[shift + 1003 :].any()
        assert not copy[:shift].any() and not copy[shift + 1003 :].any()
