"""`TransformerLayer` against a plain float64 formula with the very masks of its dropout, in both orders and with every
option.
"""

import itertools
import math

import dsx_ops
import pytest
import torch
from dsx_ops.transformer import keyed
from torch.nn.functional import gelu, layer_norm

SIZES = {"hidden_size": 32, "heads": 4, "intermediate_size": 80, "num_hidden_layers": 3}
OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint", "stochastic_mode")
ONE_BY_ONE = [{}, *({o: True} for o in OPTIONS), dict.fromkeys(OPTIONS, True)]


def layer_of(seed=0, **options):
    torch.manual_seed(seed)
    layer = dsx_ops.TransformerLayer(dsx_ops.TransformerConfig(**{**SIZES, **options}))
    with torch.no_grad():  # nothing at its neutral value
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return layer


def plain(layer, w, x, mask, key):
    """The layer in the words of its formula, with any dtype of weights `w`; dropout masks are those that belong to
    `key`.
    """
    c = layer.config
    batch, sequence, hidden = x.shape

    def drop(value, p, site):
        if not layer.training or p == 0:
            return value
        kept = dsx_ops.functional.dropout.dropout_mask(value.shape, p, keyed.seed_of(key, layer.salt * 4 + site))
        return torch.where(kept, value / (1 - p), 0.0)

    def norm(value, name):
        return layer_norm(
            value,
            (hidden,),
            w[f"{name}_w" if name == "norm" else f"{name}w"],
            w[f"{name}_b" if name == "norm" else f"{name}b"],
            c.layer_norm_eps,
        )

    def attend(value):
        q, k, v = (
            (value @ a.t() + b).view(batch, sequence, c.heads, hidden // c.heads).transpose(1, 2)
            for a, b in zip(w["attn_qkvw"].chunk(3), w["attn_qkvb"].chunk(3))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(hidden // c.heads)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
        context = drop(torch.softmax(scores, -1), c.attn_dropout_ratio, 0) @ v
        return drop(
            context.transpose(1, 2).reshape(x.shape) @ w["attn_ow"].t() + w["attn_ob"], c.hidden_dropout_ratio, 1
        )

    def feed(value):
        inner = gelu(value @ w["inter_w"].t() + w["inter_b"], approximate=c.gelu_approximate)
        return drop(inner @ w["output_w"].t() + w["output_b"], c.hidden_dropout_ratio, 2)

    if c.pre_layer_norm:
        middle = x + attend(norm(x, "norm"))
        return middle + feed(norm(middle, "attn_n"))
    middle = norm(x + attend(x), "attn_n")
    return norm(middle + feed(middle), "norm")


def both_ways(layer, x, mask, seed=5):
    """(result, dx, gradients by name) of the layer and of the plain formula in float64."""
    wide = x.detach().double().requires_grad_()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = layer(x, mask)
    torch.manual_seed(seed)
    weights = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wide_mask = mask if mask is None or mask.dtype is torch.bool else mask.double()
    expected = plain(layer, weights, wide, wide_mask, keyed.new_key())
    grad = torch.randn(y.shape)
    layer.zero_grad()
    y.backward(grad.to(y.dtype))
    expected.backward(grad.double())
    mine = [y, x.grad, *(p.grad for p in layer.parameters())]
    return mine, [expected, wide.grad, *(weights[n].grad for n, _ in layer.named_parameters())]


def masks(batch, sequence):
    padding = torch.zeros(batch, 1, 1, sequence)
    padding[0, ..., sequence // 2 :] = -10000.0
    yield "none", None
    yield "padding", padding
    yield "bool", (padding == 0)
    yield "full", torch.randn(batch, 4, sequence, sequence)
    yield "causal", torch.ones(sequence, sequence, dtype=torch.bool).tril()


@pytest.mark.parametrize("options", ONE_BY_ONE, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("drop", [0.0, 0.3], ids=["kept", "dropped"])
def test_forward_and_every_gradient(pre, drop, options):
    layer = layer_of(pre_layer_norm=pre, attn_dropout_ratio=drop, hidden_dropout_ratio=drop / 2, **options)
    x = torch.randn(3, 11, 32)
    for name, mask in masks(3, 11):
        for got, wanted in zip(*both_ways(layer, x, mask)):
            torch.testing.assert_close(
                got.double(), wanted, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("shape", [(1, 1, 32), (0, 4, 32), (2, 17, 32)], ids=str)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_ugly_shapes(shape, approximate):
    layer = layer_of(
        attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1, gelu_checkpoint=True, gelu_approximate=approximate
    )
    for got, wanted in zip(*both_ways(layer, torch.randn(*shape), None)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=2e-5)


def test_not_contiguous_input():
    layer = layer_of(hidden_dropout_ratio=0.1, pre_layer_norm=False)
    x = torch.randn(9, 3, 32).transpose(0, 1)
    for got, wanted in zip(*both_ways(layer, x, None)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=2e-5)


def test_masks_of_two_dimensions_say_who_takes_part():
    layer = layer_of().eval()
    x = torch.randn(2, 6, 32)
    kept = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    expected = layer(x, (1.0 - kept[:, None, None, :]) * -1e9)
    for mask in (kept, kept.bool(), kept.to(torch.int32), kept.bool()[:, None, None]):
        torch.testing.assert_close(layer(x, mask), expected)
    other = x.clone()
    other[0, 4:] = 100.0
    torch.testing.assert_close(layer(other, kept)[0, :4], layer(x, kept)[0, :4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_sixteen_bits(dtype, pre):
    layer = layer_of(pre_layer_norm=pre, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1, gelu_checkpoint=True).to(
        dtype
    )
    x = torch.randn(2, 5, 32).to(dtype)
    mine, expected = both_ways(layer, x, torch.zeros(2, 1, 1, 5))
    assert mine[0].dtype == dtype
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    for got, wanted in zip(mine, expected):
        assert (got.double() - wanted).norm() <= tolerance * wanted.norm() + 1e-3


def test_fp16_makes_parameters_in_half():
    config = dsx_ops.TransformerConfig(**SIZES, fp16=True)
    assert {p.dtype for p in dsx_ops.TransformerLayer(config).parameters()} == {torch.float16}


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_under_autocast(pre):
    layer = layer_of(
        pre_layer_norm=pre,
        attn_dropout_ratio=0.2,
        hidden_dropout_ratio=0.1,
        gelu_checkpoint=True,
        attn_dropout_checkpoint=True,
    )
    x = torch.randn(2, 5, 32)
    results = []
    for enabled in (False, True):
        torch.manual_seed(3)
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = layer(x, torch.zeros(2, 1, 1, 5))
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad for p in layer.parameters())])
    for exact, rounded in zip(*results):
        assert rounded.dtype == torch.float32
        assert 0 < (exact - rounded).norm() < 0.05 * exact.norm() + 1e-3


# ---- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_is_repeatable_new_every_time_and_off_in_eval():
    layer, x = layer_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.2), torch.randn(2, 6, 32)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("name", ["seed", "local_rank"])
def test_seed_and_rank_choose_other_masks(name):
    x, results = torch.randn(2, 6, 32), []
    for value in (-1, 0, 1, 7):
        layer = layer_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.2, **{name: value})
        torch.manual_seed(1)
        results.append(layer(x))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_replays_the_masks(reentrant):
    from torch.utils.checkpoint import checkpoint

    layer, x = layer_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.2), torch.randn(2, 6, 32, requires_grad=True)
    gradients = []
    for again in (False, True):
        torch.manual_seed(1)
        layer.zero_grad()
        y = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        y.square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    assert all(map(torch.equal, *gradients))


def test_options_that_recompute_change_no_bit():
    """Recomputed tensors are the same tensors; only the inverted norm rounds differently."""
    x, results = torch.randn(2, 9, 32), []
    for options in ({}, {"gelu_checkpoint": True}, {"attn_dropout_checkpoint": True}, {"stochastic_mode": True}):
        layer = layer_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.2, **options)
        torch.manual_seed(4)
        y = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_keyed_operators_pass_torchs_checks():
    x, b, r = (torch.randn(*s, requires_grad=True) for s in ((3, 8), (8,), (3, 8)))
    key = torch.tensor([5])
    torch.library.opcheck(torch.ops.dsx_ops.keyed_dropout.default, (x, 0.3, key, 2))
    torch.library.opcheck(torch.ops.dsx_ops.keyed_residual.default, (x, b, r, 0.3, key, 2))
    torch.library.opcheck(torch.ops.dsx_ops.keyed_bias_grad.default, (x.detach(), torch.float32, 0.3, key, 2))


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_compiles_to_one_graph_with_new_masks_in_every_step(pre):
    layer = layer_of(
        pre_layer_norm=pre,
        attn_dropout_ratio=0.2,
        hidden_dropout_ratio=0.2,
        gelu_checkpoint=True,
        attn_dropout_checkpoint=True,
    )
    x, mask = torch.randn(2, 6, 32), torch.zeros(2, 1, 1, 6)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled(x, mask), compiled(x, mask)
    assert not torch.equal(first, second)
    first.square().sum().backward()
    mine = [p.grad.clone() for p in layer.parameters()]
    torch.manual_seed(1)
    layer.zero_grad()
    y = layer(x, mask)
    y.square().sum().backward()
    torch.testing.assert_close(first, y)
    for a, p in zip(mine, layer.parameters()):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-5)


# ---- config and arguments --------------------------------------------------------------------------------------------


def test_new_weights_have_the_spread_they_should_on_every_rank():
    config = dict(hidden_size=128, heads=2, num_hidden_layers=8, initializer_range=0.05)
    layers = []
    for rank in (0, 3):
        torch.manual_seed(0)
        layers.append(dsx_ops.TransformerLayer(dsx_ops.TransformerConfig(**config, local_rank=rank)))
    for a, b in zip(layers[0].parameters(), layers[1].parameters()):
        assert torch.equal(a, b)
    for name, std in (("attn_qkvw", 0.05), ("inter_w", 0.05), ("attn_ow", 0.0125), ("output_w", 0.0125)):
        assert getattr(layers[0], name).std().item() == pytest.approx(std, rel=0.03)
    plain_range = dsx_ops.TransformerLayer(dsx_ops.TransformerConfig(**config, adjust_init_range=False))
    assert plain_range.output_w.std().item() == pytest.approx(0.05, rel=0.03)
    assert layers[0].inter_w.shape == (512, 128)


def test_initial_weights_and_biases():
    shapes = [(8, 8)] * 4 + [(8,), (32, 8), (8, 32), (8,)]
    weights = [torch.randn(*s) for s in shapes]
    biases = [None, None, None, *(torch.randn(s[0]) for s in shapes[3:])]
    config = dsx_ops.TransformerConfig(hidden_size=8, heads=2, num_hidden_layers=1)
    layer = dsx_ops.TransformerLayer(config, weights, biases)
    assert torch.equal(layer.attn_qkvw, torch.cat(weights[:3])) and not layer.attn_qkvb.any()
    for name, at in (("attn_ow", 3), ("attn_nw", 4), ("inter_w", 5), ("output_w", 6), ("norm_w", 7)):
        assert torch.equal(getattr(layer, name), weights[at])
        assert torch.equal(getattr(layer, name[:-1] + "b"), biases[at])
    for wrong, words in (
        (weights[:7], "expected 8"),
        ([*weights[:7], torch.ones(9)], r"got shape \(9,\), expected \(8,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            dsx_ops.TransformerLayer(config, wrong, biases)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_config_from_files_and_dicts(tmp_path, encoding):
    path = tmp_path / "config.json"
    path.write_text(
        '{"hidden_size": 64, "heads": 8, "num_hidden_layers": 2, "huggingface": true, "training": false}',
        encoding=encoding,
    )
    config = dsx_ops.TransformerConfig.from_json_file(path)
    assert (config.intermediate_size, config.return_tuple, config.attn_dropout_ratio) == (256, True, 0.0)
    layer = dsx_ops.TransformerLayer(config)
    (y,) = layer(torch.randn(1, 2, 64))
    assert not layer.training and y.shape == (1, 2, 64)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="did you mean 'hidden_size'"):
        dsx_ops.TransformerConfig.from_dict({"hiden_size": 64})
    with pytest.warns(UserWarning, match="batch_size means nothing"):
        dsx_ops.TransformerConfig(batch_size=4, **SIZES)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"hidden_size": -1}, "hidden_size: got -1"),
        ({"heads": 5}, "heads: got 5, expected a divisor"),
        ({"attn_dropout_ratio": 1.0}, "attn_dropout_ratio: got 1.0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: got -1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps: got 0.0"),
        ({"gelu_approximate": "fast"}, "gelu_approximate"),
    ],
)
def test_wrong_configs_are_named(change, words):
    with pytest.raises(dsx_ops.errors.HyperparameterError, match=words):
        dsx_ops.TransformerConfig(**{**SIZES, **change})


def test_a_list_given_as_grads_collects_every_gradient_of_the_next_backward():
    layer, x = layer_of(), torch.randn(2, 6, 32)
    first, second = [], []
    layer(x, grads=first)  # no backward: its hooks are gone at the next call
    layer(x, grads=second).square().sum().backward()
    assert not first
    found = {name: grad for grad, name in second}
    assert set(found) == {
        *("V_W", "V_B", "O_W", "O_B", "N2_W", "N2_B", "int_W", "int_B", "out_W", "out_B", "norm_W", "norm_B")
    }
    assert len(second) == 12
    assert torch.equal(found["V_W"], layer.attn_qkvw.grad[64:]) and torch.equal(found["int_B"], layer.inter_b.grad)
    layer(x).square().sum().backward()  # a call without a list collects nothing, nor do old hooks
    assert len(second) == 12
    with torch.no_grad():
        layer(x, grads=second)


def test_wrong_arguments_are_named():
    layer, x = layer_of(), torch.randn(2, 6, 32)
    for call, words in (
        (lambda: layer(torch.randn(2, 6, 31)), r"expected \[batch, sequence, 32\]"),
        (lambda: layer(x, torch.ones(2, 6)), "float mask of two dimensions"),
        (lambda: layer(x, torch.ones(2, 1, 1, 5)), "attention_mask: got torch.float32 of shape"),
        (lambda: layer(x, torch.ones(2, 1, 1, 6, dtype=torch.int64)), "attention_mask: got torch.int64"),
        (lambda: layer(x, None, torch.ones(4)), "argument 2"),
        (lambda: layer(x, encoder_hidden_states=x), "got encoder_hidden_states"),
        (lambda: layer(x, output_attentions=True), "got output_attentions"),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            call()
