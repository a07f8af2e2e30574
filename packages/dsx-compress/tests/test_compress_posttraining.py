"""Post-training quantisation: rounding by the formula, and blocks trained to imitate what they were."""

import pytest
import torch
from compress_zoo import TinyBert, ids
from dsx_compress import CompressionError, PostTrainingConfig, export_model, load_exported, quantize_post_training
from dsx_compress.apply import is_compressed
from dsx_compress.quantizers import fake_quantize
from torch import nn


def batches(count=3):
    return [ids(seed=seed) for seed in range(count)]


def fresh():
    torch.manual_seed(0)
    return TinyBert(2)


def test_weights_are_rounded_group_by_group():
    model, plain = fresh(), fresh()
    report = quantize_post_training(model, [], PostTrainingConfig(bits=4, group_size=8, excluded_modules=("head",)))
    assert "head" not in report.quantized and report.left == {"head": "excluded"} and not report.blocks
    weight = plain.layers[0].up.weight
    assert torch.equal(model.layers[0].up.weight, fake_quantize(weight, 4, weight.numel() // 8))
    assert torch.equal(model.head.weight, plain.head.weight)


def test_inputs_are_quantised_token_by_token():
    model = fresh()
    quantize_post_training(model, [], PostTrainingConfig(activation_bits=8))
    x = torch.randn(2, 3, 16)
    used = model.layers[0].up.activation_quantizer(x)
    assert torch.equal(used[1, 2], fake_quantize(x[1, 2], 8))


def test_layer_by_layer_distillation_brings_blocks_nearer():
    with torch.no_grad():
        expected = [fresh().eval()(batch) for batch in batches()]

    def error(**more):
        model = fresh()
        settings = PostTrainingConfig(bits=3, blocks="layers", excluded_modules=("head", "embedding"), **more)
        report = quantize_post_training(model, batches(), settings)
        model.eval()
        with torch.no_grad():
            return report, sum((model(b) - e).square().mean().item() for b, e in zip(batches(), expected))

    _, rounded = error()
    report, trained = error(steps=40, learning_rate=1e-3)
    assert trained < 0.8 * rounded
    assert [block.name for block in report.blocks] == ["layers.0", "layers.1"]
    assert all(block.after < block.before for block in report.blocks)


def test_training_that_does_harm_is_taken_back():
    model, rounded = fresh(), fresh()
    quantize_post_training(rounded, [], PostTrainingConfig(bits=4))
    quantize_post_training(model, batches(), PostTrainingConfig(bits=4, blocks="layers", steps=5, learning_rate=10.0))
    assert torch.equal(model.layers[1].up.weight, rounded.layers[1].up.weight)


def test_mode_gradients_and_inputs_come_in_any_form(tmp_path):
    model = fresh().train()
    config = PostTrainingConfig(bits=8, blocks="layers", steps=2)
    quantize_post_training(model, [{"ids": batches()[0]}, (batches()[1],)], config)
    assert model.training and all(p.grad is None for p in model.parameters())
    export_model(model, tmp_path / "a.safetensors")
    x = ids(seed=9)
    assert torch.equal(load_exported(fresh(), tmp_path / "a.safetensors").eval()(x), model.eval()(x))


def test_a_cache_that_blocks_fill_is_left_out():
    class Cache:
        """Like transformers' caches: a block appends to it in every call."""

        def __init__(self):
            self.seen = []

        def get_seq_length(self):
            return len(self.seen)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, cache=None, scale=()):
            if cache is not None:
                cache.seen.append(x)
            return (self.linear(x) * scale[0],)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            cache, scale = Cache(), (self.scale * 1.0,)
            for block in self.blocks:
                (x,) = block(x, cache, scale=scale)
            return x

    torch.manual_seed(0)
    config = PostTrainingConfig(bits=3, blocks="blocks", steps=20, learning_rate=1e-3)
    report = quantize_post_training(Model(), [torch.randn(4, 8) for _ in range(2)], config)
    assert all(block.after < block.before for block in report.blocks)


def test_mistakes_are_named():
    with pytest.raises(CompressionError, match="group_size: 5 does not divide the 16 inputs"):
        quantize_post_training(fresh(), [], PostTrainingConfig(group_size=5))
    with pytest.raises(CompressionError, match="steps without blocks"):
        quantize_post_training(fresh(), [], PostTrainingConfig(steps=5))
    with pytest.raises(CompressionError, match=r"no module 'layer'; its lists are \['layers'\]"):
        quantize_post_training(fresh(), [], PostTrainingConfig(blocks="layer", steps=5))
    with pytest.raises(CompressionError, match="got no batches"):
        quantize_post_training(fresh(), [], PostTrainingConfig(blocks="layers", steps=5))
    with pytest.raises(CompressionError, match=r"'haed' matches no layer.*head"):
        quantize_post_training(fresh(), [], PostTrainingConfig(excluded_modules=("haed",)))
    model = fresh()
    with torch.no_grad():
        model.head.weight[0, 0] = float("inf")
    with pytest.raises(CompressionError, match=r"head\.weight: got 0 NaN and 1 infinite"):
        quantize_post_training(model, [])
    assert not is_compressed(model)
    done = fresh()
    quantize_post_training(done, [])
    with pytest.raises(CompressionError, match="compressed already"):
        quantize_post_training(done, [])
