"""Packed files: the cleaned model to the last bit, of the promised size, and damage is named."""

import copy
import json
import struct

import pytest
import torch
from compress_zoo import TinyBert, TinyNet, ids, method, train
from dsx_compress import (
    CompressionError,
    compression_scheduler,
    export_model,
    init_compression,
    load_exported,
    load_quantized,
    redundancy_clean,
)
from dsx_compress.errors import CompressionDataError
from dsx_compress.export import pack_dense, read_exported
from dsx_compress.packing import pack, unpack
from dsx_compress.runtime import QuantizedLinear
from torch import nn


def weights(bits, groups=16, kind="symmetric"):
    shared = {"quantize_groups": groups, "quantization_type": kind, "quantize_weight_in_forward": True}
    return method("weight_quantization", shared, g={"start_bits": bits, "target_bits": bits})


ROWS = method("row_pruning", g={"dense_ratio": 0.5, "modules": ["up"], "related_modules": [["down"]]})
HEADS = method("head_pruning", {"num_heads": 4}, g={
    "dense_ratio": 0.5, "modules": ["attention.dense"], "related_modules": [["query", "key", "value"]]})  # fmt: skip
SPARSE = method("sparse_pruning", g={"dense_ratio": 0.3, "modules": ["query", "down"]})


def trained(config, kind=TinyBert):
    torch.manual_seed(0)
    model = init_compression(kind(), config)
    scheduler = compression_scheduler(model, config)
    if kind is TinyBert:
        train(model, scheduler, 3)
    return model.eval()


@pytest.mark.parametrize("code, low, high", [
    ("binary", -1, 1), ("ternary", -1, 1), ("int4", -8, 7), ("int8", -128, 127), ("int16", -32768, 32767)])  # fmt: skip
@pytest.mark.parametrize("columns", [1, 7, 8, 33])
def test_codes_come_back(code, low, high, columns):
    codes = torch.randint(low, high + 1, (5, columns), generator=torch.Generator().manual_seed(columns))
    if code == "binary":
        codes = codes.sign() + (codes == 0).int()
    packed = pack(codes.float(), code)
    assert torch.equal(unpack(packed, code, columns), codes.int())
    if code.startswith("int"):
        assert torch.equal(
            unpack(pack(codes.float() - low, code, signed=False), code, columns, signed=False), codes.int() - low
        )


@pytest.mark.parametrize("config", [
    *[weights(bits) for bits in (1, 2, 3, 4, 8, 12)],
    weights(4, kind="asymmetric"), weights(8, kind="asymmetric"),
    {**weights(4), **ROWS, **HEADS}, {**weights(1), **SPARSE, **ROWS}, {**weights(8), **SPARSE, **HEADS},
    {**weights(4, kind="asymmetric"), **ROWS, **SPARSE}, {**ROWS, **HEADS},
])  # fmt: skip
def test_a_file_holds_the_cleaned_model_to_the_last_bit(tmp_path, config):
    model = trained(config)
    path = tmp_path / "model.safetensors"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_model(model, path, config)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    clean = redundancy_clean(copy.deepcopy(model), config)
    loaded = load_exported(TinyBert(), path).eval()
    expected = clean.state_dict()
    assert set(loaded.state_dict()) == set(expected)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    x = ids(seed=7)
    assert torch.equal(loaded(x), clean(x))
    fast = load_quantized(TinyBert(), path).eval()
    torch.testing.assert_close(fast(x), clean(x), rtol=1e-5, atol=1e-5)
    if "weight_quantization" in config:
        assert any(isinstance(m, QuantizedLinear) for m in fast.modules())


def test_convolutions_and_pruned_channels(tmp_path):
    config = {**weights(8, groups=2), **method("channel_pruning", g={
        "dense_ratio": 0.5, "modules": ["conv1"], "related_modules": [["bn1", "conv2"]]})}  # fmt: skip
    model = trained(config, TinyNet)
    path = tmp_path / "net.safetensors"
    export_model(model, path, config)
    loaded = load_exported(TinyNet(), path).eval()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)
    assert loaded.conv1.out_channels == 4


@pytest.mark.parametrize("bits, smaller", [(1, 31.0), (2, 15.8), (4, 7.8), (8, 3.97)])
def test_size_on_disk_with_all_metadata(tmp_path, bits, smaller):
    """A matrix of 4096 columns with a scale for each row, measured as files."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    rows = 256
    model = nn.Sequential(nn.Linear(4096, rows, bias=False))
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    config = weights(bits, groups=rows)
    compression_scheduler(init_compression(model, config), config)
    export_model(model, tmp_path / "packed.safetensors", config)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("dense", "packed")]
    assert sizes[0] / sizes[1] >= smaller


def test_tied_weights_are_stored_once(tmp_path):
    config = method("sparse_pruning", g={"modules": ["up"]})
    model = TinyBert()
    model.head.weight = model.embedding.weight
    compression_scheduler(init_compression(model, config), config)
    found = export_model(model, tmp_path / "a.safetensors", config)
    assert set(found.dense) == set(TinyBert().state_dict())
    again = load_exported(TinyBert(), tmp_path / "a.safetensors")
    assert torch.equal(again.head.weight, model.embedding.weight)


def test_what_no_code_holds_is_left_dense_and_said(tmp_path):
    config = {**weights(4, groups=1, kind="asymmetric"), **SPARSE}
    torch.manual_seed(0)
    model = init_compression(TinyBert(), config)
    with torch.no_grad():
        for layer in model.layers:
            layer.down.parametrizations.weight.original.abs_().add_(1.0)  # 0 is far outside of the range
    compression_scheduler(model, config)
    found = export_model(model, tmp_path / "a.safetensors", config)
    assert set(found.left_dense) == {"layers.0.down.weight", "layers.1.down.weight"}
    assert "does not contain" in found.left_dense["layers.0.down.weight"]
    clean = redundancy_clean(copy.deepcopy(model), config)
    assert torch.equal(
        load_exported(TinyBert(), tmp_path / "a.safetensors").layers[0].down.weight, clean.layers[0].down.weight
    )


def test_any_safetensors_reader_opens_it(tmp_path):
    from safetensors.torch import load_file

    config = weights(8)
    export_model(trained(config), tmp_path / "a.safetensors", config)
    tensors = load_file(tmp_path / "a.safetensors")
    assert tensors["head.weight.codes"].dtype == torch.int8
    value = (tensors["head.weight.codes"].float().view(16, -1) * tensors["head.weight.scale"][:, None]).view(20, 16)
    assert torch.equal(value, read_exported(tmp_path / "a.safetensors").state_dict()["head.weight"])


def broken(path, change):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    inner = json.loads(header["__metadata__"]["dsx_compress"])
    change(inner)
    header["__metadata__"]["dsx_compress"] = json.dumps(inner)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize("change, message", [
    (lambda h: h.update(format=2), "format 2, expected 1"),
    (lambda h: h["tensors"]["head.weight"].update(shape=[20, 17]), "do not make the shape"),
    (lambda h: h["tensors"]["head.weight"].update(code="int5"), "code 'int5', expected one of"),
    (lambda h: h["tensors"]["head.weight"].update(dtype="float12"), "metadata is damaged"),
    (lambda h: h.pop("aliases"), "metadata is damaged"),
])  # fmt: skip
def test_damaged_metadata_is_named(tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    config = weights(4)
    export_model(trained(config), path, config)
    broken(path, change)
    with pytest.raises(CompressionDataError, match=message):
        read_exported(path)


def test_other_files_and_models_are_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    with pytest.raises(CompressionDataError, match="cannot be read"):
        read_exported(path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(CompressionDataError, match="cannot be read"):
        read_exported(path)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(CompressionDataError, match="has no dsx_compress metadata"):
        read_exported(path)
    config = weights(4)
    export_model(trained(config), path, config)
    model = TinyBert(1)
    before = copy.deepcopy(model.state_dict())
    for load in (load_exported, load_quantized):
        with pytest.raises(CompressionError, match="build the model that was exported"):
            load(model, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(CompressionError, match="no techniques"):
        export_model(TinyBert(1), path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    import safetensors.torch

    config = weights(4)
    path = tmp_path / "a.safetensors"
    export_model(trained(config), path, config)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export_model(trained(config), path, config)
    assert path.read_bytes() == before


def test_a_quantised_layer_is_its_dense_one_and_can_be_copied_and_saved(tmp_path):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(6, 32), torch.randn(6), torch.randn(2, 5, 32)
    for bits in (8, 4, 2, 1):
        packed, facts = pack_dense(weight, bits, 6)
        layer = QuantizedLinear(packed, bias)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, packed.dense(), bias))
        torch.testing.assert_close(layer(x[0, :1]), nn.functional.linear(x[0, :1], packed.dense(), bias))
        torch.save(layer, tmp_path / "layer.pt")
        again = torch.load(tmp_path / "layer.pt", weights_only=False)
        assert torch.equal(copy.deepcopy(layer)(x), again(x))
        assert 0 < facts["error"] < 1
