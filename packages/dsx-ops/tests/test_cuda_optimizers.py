"""The CUDA kernels of the optimizers, run on the host by the emulator: the bits of the PyTorch reference, whatever the
dtypes and shapes.
"""

import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path

import dsx_ops
import pytest
import torch
from dsx_ops import update
from dsx_ops.cuda import flat
from dsx_ops.cuda import optimizers as cuda_optimizers
from dsx_ops.spec import Algorithm, Batch, Hyper, Slot

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 255, 257, 2049, 16384, 16385, 40_001)
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
    "lamb": lambda ps, **k: dsx_ops.FusedLamb(ps, lr=1e-2, weight_decay=0.1, **k),
}


@pytest.fixture
def on_emulator(emulator, monkeypatch):
    """Optimizers over host tensors go through the CUDA kernels."""

    def switch():
        monkeypatch.setattr(update, "apply", lambda batch: cuda_optimizers.run(emulator, batch))
        monkeypatch.setattr(update, "lamb_update", lambda batch: cuda_optimizers.lamb_update(emulator, batch))
        monkeypatch.setattr(update, "lamb_apply", lambda batch, c: cuda_optimizers.lamb_apply(emulator, batch, c))

    return switch


def same(a, b):
    """Equal bit patterns; any NaN equals any NaN."""
    if a.dtype.is_floating_point:
        zeros = torch.equal(a.signbit()[a == 0], b.signbit()[b == 0])
        return zeros and bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def train(make, dtype, steps=2, sizes=SIZES, copy=torch.bfloat16, scale=3.0, spoil=None, **options):
    """Parameters, states and copies after a few steps on reproducible data; tensors begin at unaligned addresses now
    and then.
    """
    generator = torch.Generator().manual_seed(1)
    params = []
    for i, n in enumerate(sizes):
        room = torch.randn(n + 2, generator=generator).to(dtype)
        params.append(room[i % 3 : i % 3 + n].detach())
    optimizer = make(params, **options)
    copies = {p: torch.empty(p.numel(), dtype=copy) for p in params} if copy else {}
    for _ in range(steps):
        for p in params:
            p.grad = (torch.randn(p.numel(), generator=generator) * 8).to(dtype)
            if spoil is not None and p.numel() > 2:
                p.grad[-2] = spoil
        optimizer.step(grad_scale=scale, copy_out=copies)
    state = [t for p in params for _, t in sorted(optimizer.state[p].items()) if isinstance(t, torch.Tensor)]
    return params + state + list(copies.values())


@pytest.mark.parametrize("rule", [r for r in RULES if r != "lamb"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_as_the_reference(rule, dtype, on_emulator):
    options = {} if rule in ("sgd", "adam8") else {"state_dtype": torch.float32}
    with dsx_ops.reference_only():
        expected = train(RULES[rule], dtype, **options)
    on_emulator()
    for i, (a, b) in enumerate(zip(expected, train(RULES[rule], dtype, **options))):
        assert same(a, b), f"{rule} {dtype}: tensor {i}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lamb_to_rounding(dtype, on_emulator):
    with dsx_ops.reference_only():
        expected = train(RULES["lamb"], dtype, state_dtype=torch.float32)
    on_emulator()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for a, b in zip(expected, train(RULES["lamb"], dtype, state_dtype=torch.float32)):
        torch.testing.assert_close(b.float(), a.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 1e-42])
@pytest.mark.parametrize("rule", ["adamw", "adagrad", "lion", "adam8"])
def test_special_gradients(rule, spoil, on_emulator):
    with dsx_ops.reference_only():
        expected = train(RULES[rule], torch.float32, sizes=(3, 300, 2049), spoil=spoil)
    on_emulator()
    assert all(
        same(a, b) for a, b in zip(expected, train(RULES[rule], torch.float32, sizes=(3, 300, 2049), spoil=spoil))
    )


@pytest.mark.parametrize("copy", [None, *FLOATS], ids=str)
def test_every_combination_of_dtypes(copy, emulator):
    for p_dtype, g_dtype, s_dtype in itertools.product(FLOATS, FLOATS, FLOATS):
        hyper = Hyper(1e-2, (0.9, 0.99), 1e-8, 0.1, 3, decoupled=True, grad_scale=1.7)
        generator = torch.Generator().manual_seed(2)
        slots = []
        for n in (1037, 512):
            p, g, m, v = (torch.randn(n, generator=generator) for _ in range(4))
            out = torch.empty(n, dtype=copy) if copy else None
            states = (m.to(s_dtype), v.abs().to(s_dtype))
            slots.append(Slot(p.to(p_dtype), g.to(g_dtype), states, copy=out))
        kept = [
            Slot(
                s.param.clone(),
                s.grad,
                tuple(t.clone() for t in s.states),
                copy=None if copy is None else s.copy.clone(),
            )
            for s in slots
        ]
        with dsx_ops.reference_only():
            update.apply(Batch(Algorithm.ADAM, hyper, kept))
        cuda_optimizers.run(emulator, Batch(Algorithm.ADAM, hyper, slots))
        for a, b in zip(kept, slots):
            assert same(a.param, b.param) and all(map(same, a.states, b.states)), (p_dtype, g_dtype, s_dtype)
            assert copy is None or same(a.copy, b.copy)


@pytest.mark.parametrize("rule", ["adamw", "adam8"])
def test_split_masters(rule, on_emulator):
    make = {
        "adamw": lambda ps: dsx_ops.FusedAdam(ps, lr=1e-2, split_master=True, weight_decay=0.1),
        "adam8": lambda ps: dsx_ops.Adam8bit(ps, lr=1e-2, split_master=True),
    }[rule]
    with dsx_ops.reference_only():
        expected = train(make, torch.bfloat16)
    on_emulator()
    assert all(same(a, b) for a, b in zip(expected, train(make, torch.bfloat16)))


def test_more_tensors_than_a_launch_takes(on_emulator, emulator):
    sizes = [1 + i % 70 for i in range(300)]
    with dsx_ops.reference_only():
        expected = train(RULES["adamw"], torch.float32, steps=1, sizes=sizes)
    on_emulator()
    before = emulator.launches()
    assert all(same(a, b) for a, b in zip(expected, train(RULES["adamw"], torch.float32, steps=1, sizes=sizes)))
    assert emulator.launches() - before == 3  # 128 tensors each


@pytest.mark.parametrize("rule", ["adamw", "adam_plain", "lion", "adagrad", "sgdm", "adam8", "lamb"])
def test_numbers_on_the_device(rule, on_emulator):
    """lr and grad_scale as tensors are read by a kernel; the factors are those of the host."""
    on_emulator()
    runs = []
    for tensors in (False, True):

        def make(ps, tensors=tensors):
            optimizer = RULES[rule](ps)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(0.0078125) if tensors else 0.0078125
            return optimizer

        scale = torch.tensor(3.0) if tensors else 3.0
        runs.append(train(make, torch.float32, steps=3, sizes=(5, 700), scale=scale))
    for a, b in zip(*runs):
        if rule == "lamb":
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        else:
            assert same(a, b)


@pytest.mark.parametrize("rule", RULES)
def test_found_inf_leaves_everything_and_does_not_count(rule, on_emulator, monkeypatch):
    """Skipping is decided by the kernels; afterwards all is as if the skipped steps had never been asked for."""

    def steps(flags, **how):
        generator = torch.Generator().manual_seed(4)
        params = [torch.randn(n, generator=generator) for n in (5, 700)]
        optimizer = RULES[rule](params)
        for flag in flags:
            for p in params:
                p.grad = torch.randn(p.numel(), generator=generator)
            if flag is None:
                continue
            before = [p.clone() for p in params]
            optimizer.step(
                grad_scale=torch.tensor(2.0), **({} if flag is False else {"found_inf": torch.tensor([flag])})
            )
            assert not flag or all(map(torch.equal, before, params))
        return params, optimizer.state_dict()["state"]

    on_emulator()
    expected, plain_state = steps((False, None, False, None, None, False))
    monkeypatch.setattr(update, "decides_on_device", lambda *_: True)
    got, state = steps((0.0, 1.0, 0.0, 1.0, 1.0, 0.0))
    assert all(state[i]["step"] == plain_state[i]["step"] == 3 for i in state)
    if rule == "adam8":  # its noise is keyed by the steps asked for
        assert all((a - b).abs().max() < 0.05 for a, b in zip(expected, got))
        return
    for a, b in zip(expected, got):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_parameters_that_join_late_count_their_own_steps(on_emulator, monkeypatch):
    on_emulator()
    monkeypatch.setattr(update, "decides_on_device", lambda *_: True)
    early, late = torch.ones(9), torch.ones(9)
    optimizer = dsx_ops.FusedAdam([early, late], lr=1e-2)
    for flag in (0.0, 1.0, 1.0):
        early.grad = torch.ones(9)
        optimizer.step(found_inf=torch.tensor(flag))
    late.grad = torch.ones(9)
    optimizer.step(found_inf=torch.tensor(0.0))
    assert torch.allclose(late, torch.full((9,), 0.99), atol=1e-6)
    assert [s["step"] for s in optimizer.state_dict()["state"].values()] == [2, 1]


def test_torchs_grad_scaler_is_understood():
    """On the host: gradients that overflow leave everything, others are unscaled inside the pass."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = dsx_ops.SGD([p], lr=1.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    for wrong in (False, True):
        optimizer.zero_grad()
        before = p.detach().clone()
        scaler.scale((p * (float("inf") if wrong else 0.25)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p, before if wrong else before - 0.25)
    assert scaler.get_scale() == 4.0 and not hasattr(optimizer, "grad_scale")


def test_offsets_key_the_noise(on_emulator):
    outcomes = []
    for switch in (False, True):
        if switch:
            on_emulator()
        for offset in (0, 256, 2**32, 2**40):
            optimizer, p = dsx_ops.Adam8bit([torch.zeros(1)], lr=1e-2), torch.linspace(-1, 1, 512)
            state = optimizer.new_flat_state(p)
            for _ in range(2):
                optimizer.step_flat(p, torch.linspace(1, 2, 512).sin(), state, offset=offset)
            outcomes.append((p, state["exp_avg"]))
    assert all(torch.equal(a, b) for one, other in zip(outcomes[:4], outcomes[4:]) for a, b in zip(one, other))
    assert not torch.equal(outcomes[0][1], outcomes[2][1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_and_scaling(dtype, each_order):
    emulator = each_order
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(n, generator=generator).to(dtype)[n % 2 :] for n in (0, 1, 5, 16385, 40_001, *range(2, 130))]
    got = flat.squares(emulator, tensors)
    wanted = torch.stack([t.double().square().sum() for t in tensors])
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=0)
    assert torch.equal(got, flat.squares(emulator, tensors))
    distinct = [t.clone() for t in tensors[:5]]
    flat.scale(emulator, distinct, 0.3)
    for kept, new in zip(tensors, distinct):
        assert same(new, (kept.float() * torch.tensor(0.3)).to(dtype))


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_without_a_host_number(max_norm, emulator, monkeypatch):
    monkeypatch.setattr(update, "_cuda_module", lambda tensors: emulator)
    grads = [torch.randn(n) for n in (3, 4097)]
    mine, theirs = [g.clone() for g in grads], [torch.nn.Parameter(g.clone()) for g in grads]
    for p, g in zip(theirs, grads):
        p.grad = g.clone()
    total = update.clip_(mine, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(total.float(), expected)
    for a, p in zip(mine, theirs):
        torch.testing.assert_close(a, p.grad)
    spoiled = [torch.tensor([1.0, float("nan")])]
    assert update.clip_(spoiled, 1.0).isnan() and spoiled[0][0] == 1.0


def test_norm_is_not_finite_exactly_when_an_element_is_not(emulator):
    for value in (float("nan"), float("inf"), -float("inf")):
        x = torch.full((20_000,), 3e38)
        assert flat.squares(emulator, [x]).isfinite().all()
        x[19_999] = value
        assert not flat.squares(emulator, [x]).isfinite().any()


def test_nothing_is_written_outside(emulator):
    """Guards around every tensor stay as they are."""
    for n, at in itertools.product((1, 2, 3, 5, 255, 1023), (64, 65, 67)):
        rooms = [torch.full((n + 128,), 7.0) for _ in range(4)] + [torch.full((n + 128,), 7.0, dtype=torch.bfloat16)]
        p, g, m, v, copy = (room[at : at + n] for room in rooms)
        slot = Slot(p, g, (m, v), copy=copy)
        cuda_optimizers.run(emulator, Batch(Algorithm.ADAM, Hyper(1e-2, (0.9, 0.99), 1e-8), [slot]))
        for room in rooms:
            assert (room[:at] == 7).all() and (room[at + n :] == 7).all()


def test_a_missing_barrier_is_found_and_divergence_is_an_error():
    """The emulator itself: what the tests above rest on."""
    source = Path(__file__).resolve().parents[1] / "native" / "cuda"
    shared = Path(__file__).resolve().parents[3] / "tools" / "native"
    if not source.is_dir() or not shared.is_dir() or shutil.which("g++") is None:
        pytest.skip("needs the CUDA sources, which the wheel does not have, and g++")
    program = r"""
#include <cstdio>
#include "launch.cuh"
using namespace dsx::cuda;
__global__ void reverse(float* x, int barrier) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x];
    if (barrier) __syncthreads();
    x[threadIdx.x] = held[63 - threadIdx.x];
}
__global__ void diverge(float*, int) { if (threadIdx.x < 32) __syncthreads(); }
int main() {
    for (int barrier = 1; barrier >= 0; --barrier) {
        int wrong = 0;
        for (unsigned order : {0u, 1u, 5u}) {
            float x[64];
            for (int i = 0; i < 64; ++i) x[i] = i;
            emu::Machine::get().order = order;
            launch(Where{}, reverse, 1, 64, x, barrier);
            for (int i = 0; i < 64; ++i) wrong += x[i] != 63 - i;
        }
        printf("%d ", wrong > 0);
    }
    try { launch(Where{}, diverge, 1, 64, (float*)nullptr, 0); printf("no error\n"); }
    catch (const std::exception& e) { printf("%s\n", e.what()); }
}
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "main.cpp")
        path.write_text(program)
        include = [f"-I{source}", f"-I{source.parent / 'include'}", f"-I{shared}"]
        subprocess.check_call(
            ["g++", "-std=c++17", "-DDSX_CUDA_EMULATED=1", *include, str(path), "-o", f"{folder}/main"]
        )
        out = subprocess.check_output([f"{folder}/main"], text=True)
    assert out.startswith("0 1 emulator: divergence"), out


def test_offsets_beyond_2_to_the_31(emulator):
    """Chunks of a huge row begin where 64-bit arithmetic says; nothing is touched."""
    assert emulator.chunks_of(2**33 + 1) == 2**33 // 16384 + 1


pytestmark = pytest.mark.native
