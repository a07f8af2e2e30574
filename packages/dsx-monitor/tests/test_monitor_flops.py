"""Flops against analytical counts, worked out by hand from shapes for each model."""

import json

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from dsx_monitor import FlopsProfiler, get_model_profile  # noqa: E402
from dsx_monitor.flops import duration_to_string, flops_to_string, macs_to_string, params_to_string  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def measure(model, *args, **kwargs):
    return get_model_profile(model, args=args, kwargs=kwargs, print_profile=False, as_string=False, warm_up=0)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
            heads,
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x):
        return torch.einsum("bti,hij->bhtj", x, self.weight)


@pytest.mark.parametrize(
    "model, args, macs, more_flops",
    [
        (nn.Linear(8, 16), (torch.randn(4, 8),), 4 * 8 * 16, 4 * 16),
        (nn.Linear(8, 16, bias=False), (torch.randn(2, 3, 8),), 6 * 8 * 16, 0),
        (Attention(32, 4), (torch.randn(2, 10, 32),), 20 * 32 * 128 + 2 * 2 * 4 * 10 * 10 * 8, 0),
        (nn.Conv1d(4, 8, 3, bias=False), (torch.randn(2, 4, 12),), 2 * 10 * 8 * 4 * 3, 0),
        (nn.Conv2d(4, 8, 3, groups=2, padding=1), (torch.randn(2, 4, 5, 7),), 2 * 35 * 8 * 2 * 9, 2 * 35 * 8),
        (nn.Conv3d(2, 4, 2, bias=False), (torch.randn(1, 2, 4, 4, 4),), 27 * 4 * 2 * 8, 0),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False), (torch.randn(2, 4, 5, 5),), 2 * 25 * 4 * 6 * 9, 0),
        (Einsum(), (torch.randn(2, 5, 8),), 2 * 5 * 8 * 4 * 16, 0),
        (Tied(), (torch.arange(12).view(3, 4),), 12 * 16 * 50, 0),
        (nn.LayerNorm(16), (torch.randn(4, 16),), 0, 5 * 64),
        (nn.LayerNorm(16, elementwise_affine=False), (torch.randn(4, 16),), 0, 4 * 64),
        (nn.BatchNorm2d(3), (torch.randn(2, 3, 4, 4),), 0, 2 * 96),  # in evaluation mode, as everything here
        (nn.Sequential(nn.GELU(), nn.Softmax(-1)), (torch.randn(4, 16),), 0, 2 * 64),
        (nn.Sequential(nn.Dropout(0.5), nn.Flatten()), (torch.randn(4, 16),), 0, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_counts_are_the_analytical_ones(model, args, macs, more_flops):
    flops, counted, params = measure(model, *args)
    assert counted == macs
    if more_flops is not None:
        assert flops == 2 * macs + more_flops
    assert params == sum(p.numel() for p in model.parameters())


def test_a_batch_norm_that_trains_counts_its_statistics():
    profiler = FlopsProfiler(nn.BatchNorm2d(3))
    profiler.start_profile()
    profiler.model(torch.randn(2, 3, 4, 4))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 5 * 96


def test_a_profile_of_one_call_leaves_modes_and_statistics_as_they_were():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.BatchNorm2d(3).eval())
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append([m.training for m in module.modules()]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    get_model_profile(model, (2, 2, 8, 8), print_profile=False)
    assert seen == [[False] * 5] * 2  # the warm-up and the call itself
    assert [m.training for m in model] == [True, True, True, False] and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError):
        get_model_profile(model, (2, 5, 8, 8), print_profile=False)
    assert [m.training for m in model] == [True, True, True, False] and model.training


def test_a_recurrent_layer_counts_both_products():
    flops, macs, _ = measure(nn.LSTM(8, 16, num_layers=2), torch.randn(5, 3, 8))
    products = 15 * 4 * 16 * (8 + 16) + 15 * 4 * 16 * (16 + 16)
    assert macs == products and 2 * products < flops < 2.2 * products
    for model, x, gates in ((nn.GRU(8, 16), torch.randn(5, 3, 8), 3), (nn.LSTMCell(8, 16), torch.randn(15, 8), 4)):
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(x)
        profiler.stop_profile()
        assert profiler.get_total_macs() == 15 * gates * 16 * (8 + 16) and not profiler.get_unknown_operators()


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_attention_costs_the_same_whichever_kernel_runs_and_inference_mode_hides_nothing(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = Attention(32, 4)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with sdpa_kernel(getattr(SDPBackend, backend)), mode():
            _, macs, _ = measure(model, torch.randn(2, 10, 32))
        assert macs == 20 * 32 * 128 + 2 * 2 * 4 * 10 * 10 * 8


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True], ids=["", "sequences of different lengths"])
def test_the_fused_layers_of_evaluation_count_as_the_others(padded):
    layers, width, inner, lengths = 2, 16, 32, (8, 5 if padded else 8)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, inner, batch_first=True), layers).eval()
    x, hidden = torch.randn(2, 8, width), torch.arange(8) >= torch.tensor(lengths)[:, None]
    kwargs = {"src_key_padding_mask": hidden} if padded else {}
    expected = model(x, **kwargs)
    weights, attention = 4 * width * width + 2 * width * inner, 2 * 2 * 8 * 8 * width
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        profiler = FlopsProfiler(model)
        with mode():
            profiler.start_profile()
            out = model(x, **kwargs)
            profiler.stop_profile()
        # Without gradients torch leaves the padding out where it can.
        rows = 16 if mode is torch.enable_grad else sum(lengths)
        assert profiler.get_total_macs() == layers * (rows * weights + attention)
        assert not profiler.get_unknown_operators()
        assert torch.allclose(out[~hidden], expected[~hidden], atol=1e-5)


def test_a_rule_that_fails_does_not_stop_the_model(monkeypatch):
    from dsx_monitor.flops import rules

    def fails(args, out):
        raise RuntimeError("a form of tensor that nobody thought of")

    monkeypatch.setitem(rules.RULES, "mm", fails)
    model, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    assert torch.equal(model(x), x @ model.weight.T)
    profiler.stop_profile()
    assert profiler.get_unknown_operators() == {"aten::mm": 2} and profiler.get_total_macs() == 0


def test_backward_is_measured():
    model = nn.Linear(8, 16, bias=False)
    profiler = FlopsProfiler(model)
    for needs_input_gradient, products in ((False, 1), (True, 2)):
        profiler.start_profile()
        model(torch.randn(4, 8, requires_grad=needs_input_gradient)).backward(torch.ones(4, 16))
        profiler.stop_profile()
        assert profiler.get_total_flops() == 2 * 4 * 8 * 16
        assert profiler.get_total_backward_flops() == products * 2 * 4 * 8 * 16
        model.weight.grad = None
    assert profiler.get_total_recompute_flops() == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_counted_as_it_runs_and_not_as_forward(reentrant):
    block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(4, 8, requires_grad=True)).backward(torch.ones(4, 8))
    profiler.stop_profile()
    forward = 2 * 2 * 4 * 8 * 8 + 4 * 8
    assert profiler.get_total_flops() == forward
    # Without reentry PyTorch stops recomputing when it has what backward needs: before the last product.
    assert profiler.get_total_recompute_flops() in (forward, forward - 2 * 4 * 8 * 8)
    assert profiler.get_total_backward_flops() == profiler.get_total_recompute_flops() + 2 * 2 * 2 * 4 * 8 * 8 + 4 * 8


def test_the_tree_says_who_called_what_and_nothing_stays_on_the_model():
    shared = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(nn.Sequential(shared, shared), nn.ReLU())
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(4, 8))
    profiler.stop_profile()
    nodes = {node.name: node for _, node in profiler.root.walk()}
    assert (nodes["0.0"].calls, nodes["0.0"].macs, nodes["0.0"].params) == (2, 2 * 4 * 64, 64)
    assert nodes["0"].flops == nodes[""].flops - 32 and nodes["1"].flops == 32
    assert 0 < nodes["0.0"].seconds <= nodes["0"].seconds <= nodes[""].seconds == profiler.get_total_duration()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    before = profiler.get_total_flops()
    model(torch.randn(4, 8))
    assert profiler.get_total_flops() == before


def test_a_forward_that_raises_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("x")

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    with pytest.raises(KeyError):
        measure(model, torch.randn(1, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_ignored_classes_are_left_out_with_all_they_call():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    flops, _, _ = get_model_profile(model, (4, 8), print_profile=False, as_string=False, ignore_modules=[nn.Linear])
    assert flops == 0


def test_what_is_not_known_is_named():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x @ x)

    model = Odd()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.eye(4))
    profiler.stop_profile()
    assert profiler.get_total_macs() == 64
    assert any("inv" in name or "lu" in name for name in profiler.get_unknown_operators())


def test_the_text_has_summary_aggregate_and_tree(tmp_path, capsys):
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU())
    found = get_model_profile(model, (2, 1000))
    assert found == ("4.00 MFLOPS", "2.00 MMACs", "1.00 M")
    text = capsys.readouterr().out
    assert "aggregated profile" in text and "0 Linear: 1.00 M, 100.00%, 2.00 MMACs, 100.00%" in text
    out = tmp_path / "deep" / "profile.txt"
    get_model_profile(model, (2, 1000), detailed=False, output_file=str(out))
    assert "fwd latency" in out.read_text() and "% params" not in out.read_text() and not capsys.readouterr().out


def test_the_json_form_holds_the_tree(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 4, bias=False)))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(3, 8)).sum().backward()
    profiler.stop_profile()
    profiler.print_model_profile(profile_step=7, output_file=str(tmp_path / "p.json"))
    found = json.loads((tmp_path / "p.json").read_text())
    first, second = found["modules"]["children"]
    assert (found["step"], found["model"], found["modules"]["macs"]) == (7, "Sequential", 3 * 8 * 12)
    assert (first["name"], first["class"], first["macs"], first["params"]) == ("0", "Linear", 3 * 64, 64)
    # The first layer's input is data: its backward is one product, the second's two.
    assert first["backward_macs"] == 3 * 64 and second["children"][0]["backward_macs"] == 2 * 3 * 32
    assert found["totals"]["backward_flops"] >= 2 * (3 * 64 + 2 * 3 * 32)
    assert found["totals"]["backward_seconds"] > 0 and "bwd FLOPS per GPU" in found["summary"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_belongs_to_the_module_whose_forward_made_it_also_when_recomputed(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            # A function, not a module, is recomputed; the second module runs again inside it.
            return checkpoint(lambda y: self.second(y).tanh(), self.first(x), use_reentrant=reentrant)

    model = Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(4, 8)).sum().backward()
    profiler.stop_profile()
    nodes = {node.name: node for _, node in profiler.root.walk()}
    product = 2 * 4 * 8 * 8
    assert nodes["first"].backward_flops == product  # its input is data
    assert nodes["second"].backward_flops - nodes["second"].recompute_flops == 2 * product
    assert nodes["second"].recompute_flops == product and nodes["second"].calls == 1
    assert nodes[""].backward_flops == profiler.get_total_backward_flops()
    assert 0 < nodes["second"].backward_seconds <= profiler.get_total_backward_duration()


def test_what_hooks_do_with_gradients_is_not_the_models_backward():
    model = nn.Linear(8, 8, bias=False)

    def reduce(parameter):
        parameter.grad.mul_(2).add_(1)

    model.weight.register_post_accumulate_grad_hook(reduce)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):  # the second adds to the first one's gradient
        model(torch.randn(4, 8)).backward(torch.ones(4, 8))
    profiler.stop_profile()
    assert profiler.get_total_backward_flops() == 2 * 2 * 4 * 64
    assert profiler.totals.outside_flops == 5 * 64


def test_units():
    assert flops_to_string(1.5e12) == "1.50 TFLOPS" and macs_to_string(2e9, "M") == "2000.00 MMACs"
    assert params_to_string(12) == "12.00" and duration_to_string(0.0025) == "2.50 ms"
    with pytest.raises(ValueError, match="'Q'"):
        flops_to_string(1, "Q")


def test_misuse_is_refused():
    profiler = FlopsProfiler(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="start_profile"):
        profiler.get_total_flops()
    with pytest.raises(RuntimeError, match="input_shape"):
        get_model_profile(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="'forward' or 'generate'"):
        get_model_profile(nn.Linear(2, 2), (1, 2), mode="backward")
