"""Configuration and choice of modules: the documented defaults work, and mistakes are named before anything changes."""

import json

import pytest
import torch
from compress_zoo import TinyBert, TinyNet, method
from dsx_compress import CompressionError, compression_scheduler, init_compression
from dsx_compress.apply import techniques_of
from dsx_compress.config import load_config
from dsx_compress.errors import CompressionConfigError
from dsx_compress.quantizers import fake_quantize
from torch import nn


def placed(model, config):
    return [(p.name, p.tensor) for p in techniques_of(init_compression(model, config))]


QUANTIZE = {"quantize_weight_in_forward": True}


@pytest.mark.parametrize("modules", [{}, {"modules": None}, {"modules": ["*"]}])
def test_a_group_without_modules_means_all_layers(modules):
    # V15: DeepSpeed raised re.error here
    found = placed(TinyNet(), method("weight_quantization", QUANTIZE, g=modules))
    assert found == [("conv1", "weight"), ("conv2", "weight"), ("fc", "weight")]
    found = placed(TinyBert(1), method("weight_quantization", QUANTIZE, g=modules))
    assert ("embedding", "weight") in found and len(found) == 8


def test_transformers_conv1d_is_a_layer():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.nf = 4
            self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x @ self.weight + self.bias

    model = nn.Sequential(Conv1D(), nn.Linear(4, 2))
    assert [n for n, t in placed(model, method("row_pruning", g={})) if t == "weight"] == ["0", "1"]
    chosen = {p.name: p.technique for p in techniques_of(model) if p.tensor == "weight"}
    assert chosen["0"].mask.shape == (4,) and chosen["0"].dim == 1


def test_activations_of_embeddings_are_left_out():
    names = [n for n, _ in placed(TinyBert(1), method("activation_quantization", g={}))]
    assert "embedding" not in names and "head" in names


def test_a_module_in_two_groups_is_refused_with_both_names():
    model = TinyBert(1)
    config = method("row_pruning", wide={"modules": ["up"]}, narrow={"modules": [r"layers\.0\.up"]})
    with pytest.raises(CompressionError, match=r"different_groups.narrow: layers.0.up is already in the group 'wide'"):
        init_compression(model, config)
    assert not list(techniques_of(model))


def test_the_same_module_may_be_in_groups_of_two_methods():
    config = {**method("row_pruning", g={"modules": ["up"]}), **method("sparse_pruning", g={"modules": ["up"]})}
    assert placed(TinyBert(1), config) == [
        ("layers.0.up", "weight"),
        ("layers.0.up", "weight"),
        ("layers.0.up", "bias"),
    ]


def test_a_pattern_that_matches_nothing_is_refused_with_near_names():
    with pytest.raises(CompressionError, match=r"'atention.qury' matches no module .*near names: .*query"):
        init_compression(TinyBert(1), method("sparse_pruning", g={"modules": ["atention.qury"]}))
    with pytest.raises(CompressionError, match=r"excluded_modules: 'nothing' matches no module"):
        init_compression(TinyBert(1), method("sparse_pruning", {"excluded_modules": ["nothing"]}, g={}))


def test_a_pattern_that_matches_only_other_kinds_says_so():
    with pytest.raises(CompressionError, match=r"matches only layers.0.norm \(LayerNorm\), to which row_pruning"):
        init_compression(TinyBert(1), method("row_pruning", g={"modules": ["norm"]}))


def test_mistakes_leave_the_model_as_it_was():
    model = TinyBert(1)
    config = {**method("weight_quantization", QUANTIZE, g={}), **method("row_pruning", g={"modules": ["nowhere"]})}
    before = list(model.state_dict())
    with pytest.raises(CompressionError):
        init_compression(model, config)
    assert list(model.state_dict()) == before


@pytest.mark.parametrize(
    "config, message",
    [
        (method("weight_quantisation", g={}), "weight_quantisation'"),
        ({"weight_quantization": {"shared_parameters": {"enable": True}}},
         "shared_parameters.enable: unknown key; near names: enabled"),
        (method("weight_quantization", g={"start_bit": 8}), "g.params.start_bit: unknown key; near names: start_bits"),
        (method("weight_quantization", g={"modules": ["("]}), "'\\(' is no regular expression"),
        (method("weight_quantization", g={"modules": []}), "an empty list selects nothing"),
        (method("weight_quantization", g={"start_bits": 4, "target_bits": 8}), "start_bits 4 is below target_bits 8"),
        (method("weight_quantization", {"quantization_type": "asymmetric"}, g={"target_bits": 1}), "are symmetric"),
        (method("weight_quantization", g={"related_modules": [["x"]]}), "changes no shapes"),
        (method("weight_quantization"), "enabled without different_groups"),
        (method("activation_quantization", g={"bits": 3}), "greater than or equal to 4"),
        (method("head_pruning", g={}), "num_heads: missing"),
        (method("head_pruning", {"num_heads": 2, "method": "l1"}, g={}), "head_pruning.shared_parameters.method"),
        (method("row_pruning", g={"dense_ratio": 0.0}), "greater than 0"),
        (method("row_pruning", g={"modules": ["a", "b"], "related_modules": [["c"]]}), "got 1 lists for 2 patterns"),
        (method("sparse_pruning", {"method": "snip_momentum", "block_pattern": "4by1"}), "expected rows x columns"),
        (method("sparse_pruning", {"method": "snip_momentum", "block_pattern": "2:4", "dense_ratio": 0.1}),
         "keeps 0.5"),
        (method("sparse_pruning", {"schedule_offset": 9, "schedule_offset_end": 3}, g={}), "before schedule_offset"),
        (method("sparse_pruning", {"block_pattern": "2x2"}, g={}), "only method snip_momentum reads this"),
        (
            {"layer_reduction": {
                "enabled": True, "keep_number_layer": 2, "teacher_layer": [1], "module_name_prefix": "x"}},
            "the same number",
        ),
    ],
)  # fmt: skip
def test_wrong_configurations_are_named(config, message):
    with pytest.raises(CompressionConfigError, match=message):
        load_config(config)


def test_configurations_come_as_section_whole_file_or_model(tmp_path):
    section = method("sparse_pruning", g={})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "compression_training": section}))
    known = load_config(section)
    assert load_config({"compression_training": section}) == load_config(str(path)) == load_config(path) == known
    assert load_config(known) is known
    path.write_text("{")
    with pytest.raises(CompressionConfigError, match="is not JSON"):
        load_config(path)
    with pytest.raises(CompressionConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.json")
    with pytest.raises(CompressionConfigError, match="expected a dictionary"):
        load_config(3)


def test_nothing_to_do_and_twice_are_refused():
    with pytest.raises(CompressionError, match="switches no method on"):
        init_compression(TinyBert(1), {})
    config = method("sparse_pruning", g={})
    model = init_compression(TinyBert(1), config)
    with pytest.raises(CompressionError, match="compressed already"):
        init_compression(model, config)


@pytest.mark.parametrize(
    "related, message",
    [
        ([["norm"]], "matches no layer"),
        ([["dwon"]], "matches no layer.*near names: .*down"),
        ([["head"]], "matches 1 layers"),
        ([[r"attention\.query"]], "neither takes nor gives the 32 outputs"),
    ],
)
def test_related_modules_must_pair_and_fit(related, message):
    with pytest.raises(CompressionError, match=message):
        init_compression(TinyBert(2), method("row_pruning", g={"modules": ["up"], "related_modules": related}))


def test_heads_and_groups_must_divide():
    with pytest.raises(CompressionError, match="do not divide into 3 heads"):
        init_compression(TinyBert(1), method("head_pruning", {"num_heads": 3}, g={"modules": ["dense"]}))
    with pytest.raises(CompressionError, match="quantize_groups: 7 does not divide"):
        init_compression(TinyBert(1), method("weight_quantization", {"quantize_groups": 7}, g={}))


class Mpu:
    def __init__(self, size):
        self.size = size

    def get_model_parallel_world_size(self):
        return self.size


class RowParallelLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))


def test_tensor_slices():
    config = method("row_pruning", g={})
    with pytest.raises(CompressionError, match="row pruning of a RowParallelLinear is not supported with 2"):
        init_compression(nn.Sequential(RowParallelLinear(4, 8)), config, mpu=Mpu(2))
    assert placed(nn.Sequential(RowParallelLinear(4, 8)), config) == [("0", "weight")]
    model = init_compression(
        nn.Sequential(RowParallelLinear(4, 8)), method("head_pruning", {"num_heads": 4}, g={}), mpu=Mpu(2)
    )
    assert next(techniques_of(model)).technique.scores.shape == (1, 2)  # this rank's heads
    with pytest.raises(CompressionError, match="without get_model_parallel_world_size"):
        init_compression(nn.Sequential(nn.Linear(2, 2)), config, mpu=object())


def test_a_plain_state_dict_still_loads():
    torch.manual_seed(0)
    plain = TinyBert(1)
    model = init_compression(
        TinyBert(1), {**method("weight_quantization", QUANTIZE, g={}), **method("row_pruning", g={"modules": ["up"]})}
    )
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and missing == ["layers.0.up.parametrizations.weight.1.mask"]
    assert torch.equal(model.layers[0].up.parametrizations.weight.original, plain.layers[0].up.weight)


def test_parameters_stay_the_same_objects():
    model = TinyBert(1)
    before = {id(p) for p in model.parameters()}
    init_compression(model, method("weight_quantization", QUANTIZE, g={}))
    assert {id(p) for p in model.parameters()} == before


@pytest.mark.parametrize(
    "bits, kind",
    [(8, "symmetric"), (4, "symmetric"), (2, "symmetric"), (1, "symmetric"), (8, "asymmetric"), (4, "asymmetric")],
)
def test_an_embedding_has_one_scale_per_row(bits, kind):
    """Whatever `quantize_groups` says, as in DeepSpeed: each row is quantised as if it were the whole table."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(6, 8), "linear": nn.Linear(8, 6)})
    with torch.no_grad():
        model["table"].weight[2] *= 100
    plain = {name: layer.weight.detach().clone() for name, layer in model.items()}
    shared = {"quantize_groups": 4, "quantization_type": kind, "quantize_weight_in_forward": True}
    groups = {"start_bits": bits, "target_bits": bits}
    config = method("weight_quantization", shared, g=groups)
    init_compression(model, config)
    compression_scheduler(model, config)
    rows = torch.cat([fake_quantize(row, bits, 1, kind) for row in plain["table"]]).view(6, 8)
    torch.testing.assert_close(model["table"].weight.detach(), rows)
    torch.testing.assert_close(model["linear"].weight.detach(), fake_quantize(plain["linear"], bits, 4, kind))


def test_a_head_tied_to_an_embedding_has_its_scales():
    model = TinyBert(1)
    model.head.weight = model.embedding.weight
    config = method("weight_quantization", {"quantize_groups": 2, "quantize_weight_in_forward": True}, g={})
    init_compression(model, config)
    compression_scheduler(model, config)
    assert torch.equal(model.head.weight, model.embedding.weight)
    stored = model.embedding.parametrizations.weight.original
    assert torch.equal(model.head.weight, fake_quantize(stored, 8, len(stored)))
