"""torch's `MultiheadAttention`: its packed projections are weights like others; its output layer is never called."""

import copy

import pytest
import torch
from compress_zoo import method
from dsx_compress import (
    CompressionError,
    PostTrainingConfig,
    compression_report,
    compression_scheduler,
    export_model,
    init_compression,
    load_exported,
    load_quantized,
    quantize_post_training,
    redundancy_clean,
)
from dsx_compress.apply import techniques_of
from dsx_compress.quantizers import fake_quantize
from torch import nn

WEIGHTS = method("weight_quantization", {"quantize_groups": 8, "quantize_weight_in_forward": True}, g={})
SPARSE = method("sparse_pruning", g={"dense_ratio": 0.25})


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, dropout=0.0, batch_first=True, norm_first=False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def trained(config, model=None):
    model = init_compression(encoder() if model is None else model, config)
    scheduler = compression_scheduler(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model


@pytest.mark.parametrize("config", [WEIGHTS, SPARSE, {**WEIGHTS, **SPARSE}], ids=["weights", "sparse", "both"])
def test_packed_projections_are_compressed_trained_and_cleaned(config, tmp_path):
    model = trained(config)
    attention = model.layers[1].self_attn
    stored = attention.parametrizations.in_proj_weight.original
    assert not torch.equal(stored, encoder().layers[1].self_attn.in_proj_weight), "the stored weight is trained"
    if config == WEIGHTS:
        assert torch.equal(attention.in_proj_weight, fake_quantize(stored, 8, 8))
    if "sparse_pruning" in config:
        assert (attention.in_proj_weight != 0).sum() == stored.numel() // 4
    assert "layers.1.self_attn.in_proj_weight" in {row.name for row in compression_report(model).rows}
    x = torch.randn(2, 5, 16)
    for mode in (True, False):  # evaluation takes torch's fast path, which reads the weights itself
        model.train(mode)
        clean = redundancy_clean(copy.deepcopy(model), config)
        with torch.no_grad():
            assert (clean(x) - model(x)).abs().max() <= 1e-6
    assert type(clean.layers[0].self_attn) is nn.MultiheadAttention
    assert set(clean.state_dict()) == set(encoder().state_dict())
    if "weight_quantization" in config:
        found = export_model(model, tmp_path / "a.safetensors", config)
        assert "layers.0.self_attn.in_proj_weight" in found.packed
        for load in (load_exported, load_quantized):
            with torch.no_grad():
                again = load(encoder(), tmp_path / "a.safetensors").train()
                torch.testing.assert_close(again(x), clean.train()(x), rtol=1e-5, atol=1e-6)


def test_projections_apart_are_three_weights():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=6, vdim=4)})
    config = method("weight_quantization", {"quantize_weight_in_forward": True}, g={"modules": ["attention$"]})
    init_compression(model, config)
    scheduler = compression_scheduler(model, config)
    assert [p.tensor for p in techniques_of(model)] == ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    state = {"model": copy.deepcopy(model.state_dict()), "scheduler": scheduler.state_dict()}
    scheduler.load_state_dict(state["scheduler"])
    model.load_state_dict(state["model"])
    q, k, v = torch.randn(3, 1, 8), torch.randn(3, 1, 6), torch.randn(3, 1, 4)
    before = model["attention"](q, k, v)[0]
    redundancy_clean(model, config)
    assert torch.equal(model["attention"](q, k, v)[0], before)


def test_the_input_of_a_layer_that_is_never_called_is_not_quantised():
    config = method("activation_quantization", {"range_calibration": "dynamic"}, g={})
    model = init_compression(encoder(), config)
    assert {p.name.rpartition(".")[2] for p in techniques_of(model)} == {"linear1", "linear2"}
    named = method("activation_quantization", g={"modules": ["out_proj"]})
    with pytest.raises(CompressionError, match=r"'out_proj' matches only layers\.0\.self_attn\.out_proj"):
        init_compression(encoder(), named)
    after = encoder()
    quantize_post_training(after, [], PostTrainingConfig(activation_bits=8))
    inputs = {p.name.rpartition(".")[2] for p in techniques_of(after) if not p.tensor}
    assert inputs == {"linear1", "linear2"}
    assert "layers.0.self_attn" in {p.name for p in techniques_of(after)}


def test_heads_of_packed_projections_are_not_removed():
    config = method("head_pruning", {"num_heads": 4}, g={
        "modules": ["out_proj"], "related_modules": [["self_attn$"]]})  # fmt: skip
    with pytest.raises(CompressionError, match=r"related_modules: 'self_attn\$' matches no layer"):
        init_compression(encoder(), config)
    masked = method("head_pruning", {"num_heads": 4}, g={"modules": ["out_proj"], "dense_ratio": 0.5})
    model = trained(masked).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, masked)
        assert (model(x) - before).abs().max() <= 1e-6
    assert (model.layers[0].self_attn.out_proj.weight.view(16, 4, 4).abs().sum((0, 2)) > 0).sum() == 2
