"""Compressed weights as torchao's tensors: the same values, and files that torchao's own functions read."""

import pytest
import torch
from compress_zoo import TinyBert, ids, method, train
from dsx_compress import (
    CompressionError,
    compression_scheduler,
    export_model,
    export_torchao,
    init_compression,
    load_exported,
    load_torchao,
    to_torchao,
)
from dsx_compress.errors import CompressionDataError


def exported(path, bits=8, kind="symmetric", groups=16, dtype=torch.float32):
    torch.manual_seed(0)
    shared = {"quantize_weight_in_forward": True, "quantize_groups": groups, "quantization_type": kind}
    config = method("weight_quantization", shared, g={"start_bits": bits, "target_bits": bits})
    model = init_compression(TinyBert(1), config)
    train(model, compression_scheduler(model, config), 3)
    export_model(model.to(dtype), path, config)
    return path


def test_without_torchao_it_says_what_to_install(tmp_path):
    try:
        import torchao  # noqa: F401
    except ImportError:
        with pytest.raises(CompressionError, match="pip install torchao"):
            to_torchao(exported(tmp_path / "a.safetensors"))


@pytest.mark.parametrize("bits, kind, groups, dtype", [
    (8, "symmetric", 1, torch.float32), (8, "asymmetric", 16, torch.bfloat16), (4, "asymmetric", 32, torch.float32),
    (4, "symmetric", 32, torch.bfloat16), (2, "symmetric", 16, torch.float32), (1, "symmetric", 1, torch.bfloat16),
])  # fmt: skip
def test_values_and_outputs_are_those_of_the_file(tmp_path, bits, kind, groups, dtype):
    torchao = pytest.importorskip("torchao.quantization")
    source = exported(tmp_path / "ours.safetensors", bits, kind, groups, dtype)
    plain = load_exported(TinyBert(1).to(dtype), source).eval()
    export_torchao(source, tmp_path / "theirs.safetensors")
    model = load_torchao(TinyBert(1).to(dtype), tmp_path / "theirs.safetensors").eval()
    weight = model.layers[0].up.weight
    assert isinstance(weight, torchao.IntxUnpackedToInt8Tensor)
    rounding = {"rtol": 0, "atol": 0} if kind == "symmetric" else {}
    torch.testing.assert_close(weight.dequantize(), plain.layers[0].up.weight.detach(), **rounding)
    torch.testing.assert_close(model(ids()), plain(ids()), **rounding)


def test_groups_across_rows_stay_dense(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    source = exported(tmp_path / "ours.safetensors", groups=16)  # 20 rows of 16 numbers: a group ends within a row
    state = to_torchao(source)
    assert type(state["head.weight"]) is torch.Tensor
    assert isinstance(state["layers.0.up.weight"], torchao.IntxUnpackedToInt8Tensor)
    assert torch.equal(state["head.weight"], load_exported(TinyBert(1), source).head.weight)


def test_other_files_and_models_are_refused(tmp_path):
    pytest.importorskip("torchao.quantization")
    source = exported(tmp_path / "ours.safetensors")
    with pytest.raises(CompressionDataError, match="expected torchao's layout"):
        load_torchao(TinyBert(1), source)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(CompressionDataError, match="cannot be read"):
        load_torchao(TinyBert(1), tmp_path / "text")
    export_torchao(source, tmp_path / "theirs.safetensors")
    with pytest.raises(CompressionError, match=r"lacks \['layers\.1"):
        load_torchao(TinyBert(2), tmp_path / "theirs.safetensors")
