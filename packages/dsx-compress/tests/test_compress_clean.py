"""Clean-up: smaller ordinary models with the same outputs, for every pruning and related module."""

import copy

import pytest
import torch
from compress_zoo import TinyBert, TinyNet, ids, method, train
from dsx_compress import (
    CompressionError,
    compression_scheduler,
    convert_conv1d_to_linear,
    get_module_name,
    init_compression,
    redundancy_clean,
)
from dsx_compress.apply import is_compressed
from dsx_compress.errors import CompressionDataError
from torch import nn

ROWS = method(
    "row_pruning", {"method": "topk"}, g={"dense_ratio": 0.5, "modules": ["up"], "related_modules": [["down"]]}
)
HEADS = method("head_pruning", {"num_heads": 4}, g={
    "dense_ratio": 0.5, "modules": ["attention.dense"], "related_modules": [["query", "key", "value"]]})  # fmt: skip
SPARSE = method("sparse_pruning", g={"dense_ratio": 0.3, "modules": ["query", "down"]})
WEIGHTS = method("weight_quantization", {"quantize_groups": 4, "quantize_weight_in_forward": True}, g={})


def trained(config, steps=5):
    torch.manual_seed(0)
    model = init_compression(TinyBert(2), config)
    train(model, compression_scheduler(model, config), steps)
    return model.eval()


def assert_same_outputs(model, config, x, **settings):
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, config, **settings)
        assert (model(x) - before).abs().max() <= 1e-6
    assert not is_compressed(model)
    assert all(type(m).__module__.startswith(("torch.", "compress_zoo")) for m in model.modules())


@pytest.mark.parametrize(
    "config",
    [WEIGHTS, SPARSE, ROWS, HEADS, {**ROWS, **HEADS}, {**WEIGHTS, **SPARSE, **ROWS, **HEADS}],
    ids=["weights", "sparse", "rows", "heads", "rows and heads", "all"],
)
def test_outputs_stay_the_same_and_names_too(config):
    plain = TinyBert(2)
    model = trained(config)
    assert_same_outputs(model, config, ids(seed=99))
    assert set(model.state_dict()) == set(plain.state_dict())
    count = sum(p.numel() for p in model.parameters())
    expected = sum(p.numel() for p in plain.parameters())
    if "row_pruning" in config:
        assert (model.layers[0].up.out_features, model.layers[0].down.in_features) == (16, 16)
        expected -= 2 * (16 * 16 + 16 + 16 * 16)
    if "head_pruning" in config:
        attention = model.layers[1].attention
        assert attention.num_heads == 2 and attention.query.weight.shape == (8, 16) and attention.dense.in_features == 8
        expected -= 2 * (3 * (8 * 16 + 8) + 16 * 8)
    assert count == expected
    train(model.train(), None, 1)  # it is an ordinary model that can be trained further


def test_without_related_modules_only_zeros_are_stored():
    config = method("row_pruning", g={"dense_ratio": 0.25, "modules": ["up"]})
    model = trained(config)
    assert_same_outputs(model, config, ids(seed=99))
    up = model.layers[0].up
    assert up.weight.shape == (32, 16) and (up.weight.abs().sum(1) > 0).sum() == 8
    assert torch.equal(up.bias == 0, up.weight.abs().sum(1) == 0)


def test_activation_quantisers_stay_unless_they_are_dropped():
    config = {
        **ROWS,
        **method("activation_quantization", {"range_calibration": "dynamic"}, g={"modules": ["up", "down"]}),
    }
    model = trained(config)
    x = ids(seed=99)
    dropped = redundancy_clean(copy.deepcopy(model), config, keep_activation_quantizers=False)
    assert not is_compressed(dropped)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, config)
        assert (model(x) - before).abs().max() <= 1e-6
        assert 0 < (dropped(x) - before).abs().max() < 0.1


@pytest.mark.parametrize("how", ["l1", "topk"])
def test_channels_with_batch_norms(how):
    # E94: DeepSpeed's l1 crashed, and a batch norm behind a pruned convolution changed the outputs
    config = method("channel_pruning", {"method": how}, g={
        "dense_ratio": 0.5, "modules": ["conv1", "conv2"],
        "related_modules": [["bn1", "conv2"], ["bn2", "fc"]]})  # fmt: skip
    torch.manual_seed(0)
    model = init_compression(TinyNet(), config)
    scheduler = compression_scheduler(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    assert_same_outputs(model, config, torch.randn(2, 3, 8, 8))
    assert model.conv1.weight.shape == (4, 3, 3, 3) and model.conv2.weight.shape == (3, 4, 3, 3)
    assert model.bn1.num_features == 4 and model.bn2.running_var.shape == (3,)
    assert model.fc.in_features == 3 * 16 and model.conv2.in_channels == 4


def test_two_patterns_in_one_group_use_each_their_own_mask():
    # E95: DeepSpeed used the first one's mask again and crashed
    config = method("row_pruning", g={
        "dense_ratio": 0.5, "modules": [r"0\.up", r"1\.up"],
        "related_modules": [[r"0\.down"], [r"1\.down"]]})  # fmt: skip
    model = trained(config)
    masks = [layer.up.parametrizations.weight[0].mask.clone() for layer in model.layers]
    assert not torch.equal(*masks)
    assert_same_outputs(model, config, ids(seed=99))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 24, bias=False), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_the_other_factor_of_a_gated_product_loses_outputs():
    config = method("row_pruning", g={"dense_ratio": 0.25, "modules": ["gate"], "related_modules": [["up", "down"]]})
    model = init_compression(Gated(), config).eval()
    compression_scheduler(model, config)
    x = torch.randn(3, 8)
    before = model(x)
    redundancy_clean(model, config)
    assert (model(x) - before).abs().max() <= 1e-6
    assert model.up.weight.shape == (6, 8) and model.down.weight.shape == (8, 6)


class Conv1D(nn.Module):
    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class FusedAttention(nn.Module):
    """Queries, keys and values side by side, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.split_size = 4, 8
        self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)

    def forward(self, x):
        q, k, v = (t.view(-1, self.num_heads, 2).transpose(0, 1) for t in self.c_attn(x).split(self.split_size, -1))
        return self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


def test_heads_of_fused_projections_and_transposed_weights():
    config = method("head_pruning", {"num_heads": 4}, g={
        "dense_ratio": 0.25, "modules": ["c_proj"], "related_modules": [["c_attn"]]})  # fmt: skip
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": FusedAttention()})["attention"]
    init_compression(model, config)
    compression_scheduler(model, config)
    x = torch.randn(5, 8)
    before = model(x)
    redundancy_clean(model, config)
    assert (model(x) - before).abs().max() <= 1e-5
    assert model.c_attn.weight.shape == (8, 6) and model.c_proj.weight.shape == (2, 8)
    assert (model.num_heads, model.split_size) == (1, 2)


def test_what_does_not_keep_zeros_is_found_with_an_example():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.down(torch.sigmoid(self.up(x)))

    config = method("row_pruning", g={"modules": ["up"], "related_modules": [["down"]]})
    model = init_compression(Bad(), config)
    compression_scheduler(model, config)
    with pytest.raises(CompressionError, match="does not keep zeros"):
        redundancy_clean(model, config, example=torch.randn(4, 8))
    assert is_compressed(model) and model.up.weight.shape == (16, 8)
    fine = trained(ROWS)
    redundancy_clean(fine, ROWS, example=(ids(),))


def test_tied_weights_stay_tied():
    model = TinyBert(1)
    model.head.weight = model.embedding.weight
    init_compression(model, WEIGHTS)
    compression_scheduler(model, WEIGHTS)
    x = ids()
    with torch.no_grad():
        before = model(x)
    redundancy_clean(model, WEIGHTS)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(x), before)


def test_clean_leaves_copies_alone():
    model = trained(ROWS)
    other = copy.deepcopy(model)
    redundancy_clean(model, ROWS)
    x = ids()
    assert torch.allclose(other(x), model(x), atol=1e-6) and is_compressed(other)


def test_other_parametrisations_stay_in_effect():
    model = TinyBert(1)
    nn.utils.parametrizations.weight_norm(model.head)
    config = method("weight_quantization", {"quantize_weight_in_forward": True}, g={"modules": ["head"]})
    init_compression(model, config)
    scheduler = compression_scheduler(model, config)
    train(model, scheduler, 3)
    x = ids()
    before = model(x)
    redundancy_clean(model, config)
    assert torch.equal(model(x), before)


def test_a_trained_state_can_be_cleaned_in_a_new_process():
    model = trained({**WEIGHTS, **ROWS, **SPARSE})
    fresh = init_compression(TinyBert(2), {**WEIGHTS, **ROWS, **SPARSE})
    fresh.load_state_dict(model.state_dict())
    redundancy_clean(fresh, {**WEIGHTS, **ROWS, **SPARSE})
    x = ids(seed=5)
    assert (fresh.eval()(x) - model(x)).abs().max() <= 1e-6


def test_nan_weights_and_plain_models_are_refused():
    model = trained(SPARSE)
    with torch.no_grad():
        model.layers[1].down.parametrizations.weight.original[0, 0] = float("nan")
    with pytest.raises(CompressionDataError, match=r"layers\.1\.down\.weight: got 1 NaN"):
        redundancy_clean(model, SPARSE)
    with pytest.raises(CompressionError, match="call init_compression first"):
        redundancy_clean(TinyBert(1), SPARSE)


def test_compiled_models_give_the_same_outputs():
    model = trained({**WEIGHTS, **ROWS})
    x = ids()
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), expected)


def test_helpers_of_deepspeed_scripts():
    model = nn.Sequential(Conv1D(6, 4), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    before = model(x)
    converted = convert_conv1d_to_linear(model, Conv1D)
    assert type(converted[0]) is nn.Linear
    torch.testing.assert_close(converted(x), before)
    found, names = get_module_name("g", TinyBert(1), "up", set())
    assert found == ["layers.0.up"] and names == {"layers.0.up"}
    with pytest.raises(CompressionError, match="already in another group"):
        get_module_name("h", TinyBert(1), "up", names)


@pytest.mark.parametrize("seed", range(3))
def test_many_layers_pair_in_the_order_of_the_model(seed):
    """Ten layers: a pairing by name, or by anything but the order, mixes layers.1 with layers.10."""
    config = method("row_pruning", g={"dense_ratio": 0.5, "modules": ["up"], "related_modules": [["down"]]})
    torch.manual_seed(seed)
    model = init_compression(TinyBert(12), config).eval()
    compression_scheduler(model, config)
    x = ids(seed=seed)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, config)
        assert (model(x) - before).abs().max() <= 1e-5 * before.abs().max()
