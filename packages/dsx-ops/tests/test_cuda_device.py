"""On a GPU: the CUDA kernels against the CPU ones, on torch's current stream, without waiting, inside graphs. See
test_cuda_optimizers for what runs everywhere.
"""

import dsx_ops
import pytest
import torch
from dsx_ops import onebit
from dsx_ops.cuda import loader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 257, 2049, 16385, 1_000_003)
RULES = {
    "adamw": lambda ps, **k: dsx_ops.FusedAdam(ps, lr=1e-2, weight_decay=0.1, **k),
    "adagrad": lambda ps, **k: dsx_ops.CPUAdagrad(ps, weight_decay=0.1),
    "lion": lambda ps, **k: dsx_ops.FusedLion(ps, lr=1e-2, weight_decay=0.1, **k),
    "sgdm": lambda ps, **k: dsx_ops.SGD(ps, lr=1e-2, momentum=0.9, dampening=0.1, **k),
    "adam8": lambda ps, **k: dsx_ops.Adam8bit(ps, lr=1e-2, weight_decay=0.1, seed=7),
    "lamb": lambda ps, **k: dsx_ops.FusedLamb(ps, lr=1e-2, weight_decay=0.1, **k),
}


@pytest.fixture(autouse=True)
def _module():
    # Kernels that should be there, and are not, are named by the stage `build` of `tools/dev.py gpu`.
    if loader.module() is None:
        pytest.skip(f"no CUDA kernels: {loader.reason()}")


@pytest.fixture
def no_waiting():
    """Any synchronising call of torch raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def data(device, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(device, dtype) for n in SIZES]


def train(device, rule, dtype, steps=3):
    params = data(device, dtype)
    optimizer = RULES[rule](params)
    for step in range(steps):
        for p, g in zip(params, data(device, dtype, seed=10 + step)):
            p.grad = g
        optimizer.step(grad_scale=3.0)
    states = [t for p in params for _, t in sorted(optimizer.state[p].items()) if isinstance(t, torch.Tensor)]
    return [t.cpu() for t in params + states]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_optimizers_have_the_bits_of_the_cpu(rule, dtype):
    for a, b in zip(train("cpu", rule, dtype), train("cuda", rule, dtype)):
        if rule == "lamb":
            torch.testing.assert_close(a, b, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
        else:
            assert torch.equal(a, b)


def test_steps_and_clipping_do_not_wait(no_waiting):
    params = data("cuda", torch.float32)
    optimizers = [make(params) for make in RULES.values()]
    scale = torch.full((), 2.0, device="cuda")
    for optimizer in optimizers:
        for p in params:
            p.grad = torch.ones_like(p)
        dsx_ops.clip_grad_norm_(params, 1.0)
        optimizer.step(grad_scale=scale)


def test_work_goes_onto_the_current_stream():
    side, p = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")
    p.grad = torch.zeros_like(p)
    optimizer = dsx_ops.SGD([p], lr=1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        p.grad.fill_(1.0)
        optimizer.step()
    side.synchronize()
    assert bool((p == -1).all())


def test_a_captured_step_replays():
    p = torch.zeros(1000, device="cuda")
    p.grad = torch.ones_like(p)
    optimizer = dsx_ops.SGD([p], lr=0.5)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = p.clone()
    for _ in range(3):
        graph.replay()
    assert torch.equal(p, before - 1.5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms(dtype):
    tensors = data("cuda", dtype)
    exact = torch.stack([t.double().square().sum() for t in tensors])
    got = dsx_ops.update.squared_norms(tensors)
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=0)
    assert torch.equal(got, dsx_ops.update.squared_norms(tensors))
    tensors[-1][5] = float("inf")
    assert not dsx_ops.norm(tensors).finite


@pytest.mark.parametrize("format", ["int8", "int4", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_and_signs_have_the_bits_of_the_cpu(dtype, format):
    for x in data("cpu", dtype):
        y = x.cuda()
        if format.startswith("int"):
            make = lambda t: dsx_ops.quantize(t, bits=int(format[3:]), stochastic=True, seed=3)  # noqa: E731
        else:
            make = lambda t: dsx_ops.quantize_fp8(t, format=format)  # noqa: E731
        for a, b in zip(make(x), make(y)):
            assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
        assert torch.equal(onebit.pack_signs(x), onebit.pack_signs(y).cpu())


@pytest.mark.parametrize("hidden", [48, 768, 1024, 5000])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_row_functions_agree_with_the_cpu(dtype, hidden):
    torch.manual_seed(0)
    x, r, w, b = torch.randn(33, hidden), torch.randn(33, hidden), torch.randn(hidden) + 2, torch.randn(hidden)
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, r, w, b)]
        u, v, weight, bias = leaves
        y = dsx_ops.layer_norm(u, weight, bias)
        y = dsx_ops.bias_gelu(y, bias)
        y = dsx_ops.bias_dropout_residual(y, bias, v, 0.1, seed=5)
        y = dsx_ops.masked_softmax(y, torch.zeros(hidden, device=device), 0.5)
        y.float().square().sum().backward()
        grads.append([y.detach().cpu(), *(t.grad.cpu() for t in leaves)])
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for a, c in zip(*grads):
        assert (a.float() - c.float()).norm() <= tolerance * a.float().norm() + 1e-5


def test_row_functions_are_the_same_in_every_run():
    torch.manual_seed(0)
    x, w = torch.randn(4096, 768, device="cuda", requires_grad=True), torch.ones(768, device="cuda", requires_grad=True)
    runs = []
    for _ in range(3):
        w.grad = x.grad = None
        dsx_ops.layer_norm(x, w, w).square().sum().backward()
        runs.append((x.grad.clone(), w.grad.clone()))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stochastic_mode": True},
        {"gelu_checkpoint": True, "attn_dropout_checkpoint": True, "normalize_invertible": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_transformer_layer_agrees_with_the_cpu(pre, options):
    config = dsx_ops.TransformerConfig(
        hidden_size=64, heads=4, num_hidden_layers=2, hidden_dropout_ratio=0.1, pre_layer_norm=pre, **options
    )
    layer, x = dsx_ops.TransformerLayer(config), torch.randn(3, 17, 64)
    kept = torch.ones(3, 17, dtype=torch.bool)
    kept[0, 9:] = False
    results = []
    for device in ("cpu", "cuda"):
        layer.to(device).zero_grad()
        torch.manual_seed(3)
        y = layer(x.to(device), kept.to(device))
        y.square().mean().backward()
        results.append([y.detach().cpu(), *(p.grad.detach().cpu().clone() for p in layer.parameters())])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_transformer_layer_is_repeatable_under_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        check_repeatable()
    finally:
        torch.use_deterministic_algorithms(False)


def check_repeatable():
    config = dsx_ops.TransformerConfig(
        hidden_size=256, heads=4, num_hidden_layers=2, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1
    )
    layer, x = dsx_ops.TransformerLayer(config).cuda(), torch.randn(8, 256, 256, device="cuda")
    runs = []
    for _ in range(3):
        torch.manual_seed(3)
        layer.zero_grad()
        layer(x).square().mean().backward()
        runs.append([p.grad.clone() for p in layer.parameters()])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
