"""The report says what was compressed, by how much, and what was not; as text, JSON, picture and command."""

import json
import xml.etree.ElementTree as ET

import pytest
import torch
from compress_zoo import TinyBert, method
from dsx_compress import compression_report, compression_scheduler, export_model, init_compression
from dsx_compress.__main__ import main


@pytest.fixture
def model():
    config = {
        **method("weight_quantization", {"quantize_groups": 4, "quantize_weight_in_forward": True}, g={
            "start_bits": 4, "target_bits": 4, "modules": ["up", "head"]}),
        **method("sparse_pruning", {"schedule_offset": 10}, late={"modules": ["query"]}),
        **method("row_pruning", g={"modules": ["up"]}),
    }  # fmt: skip
    torch.manual_seed(0)
    model = init_compression(TinyBert(1), config)
    compression_scheduler(model, config)
    return model


def test_rows_are_measured(model):
    report = compression_report(model)
    rows = {row.name: row for row in report.rows}
    assert set(rows) == {"layers.0.up.weight", "layers.0.up.bias", "head.weight", "layers.0.attention.query.weight"}
    up, stored = rows["layers.0.up.weight"], model.layers[0].up.parametrizations.weight.original
    used = model.layers[0].up.weight
    assert up.bits == 4 and up.methods == ["weight_quantization", "row_pruning"]
    assert up.density == pytest.approx((used != 0).float().mean().item()) and up.density <= 0.5
    assert up.error == pytest.approx(((stored - used).norm() / stored.norm()).item(), rel=1e-4)
    assert (up.bytes_before, up.bytes_after) == (32 * 16 * 4, 32 * 16 // 2 + 4 * 4)
    assert rows["layers.0.attention.query.weight"].methods == ["sparse_pruning from step 10"]
    assert rows["layers.0.attention.query.weight"].error == 0.0
    assert report.untouched == [
        "embedding", "layers.0.attention.key", "layers.0.attention.value", "layers.0.attention.dense", "layers.0.down"
    ]  # fmt: skip
    total = sum(p.numel() * 4 for p in model.parameters())
    assert report.ratio == pytest.approx(total / (total - up.bytes_before - 20 * 64 + up.bytes_after + 20 * 8 + 16))
    text = report.text()
    assert "layers not compressed: embedding" in text and "4 tensors compressed" in text


def test_the_picture_is_well_formed(model, tmp_path):
    compression_report(model).write_svg(tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "layers.0.up.weight" in texts and "4 bit" in texts


def test_the_command(model, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    found = export_model(model, path)
    assert main(["report", str(path), "--svg", str(tmp_path / "b.svg")]) == 0
    assert "layers.0.up.weight" in capsys.readouterr().out and (tmp_path / "b.svg").exists()
    assert main(["report", str(path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["head.weight"]["bytes_after"] == found.packed["head.weight"].bytes
    assert rows["head.weight"]["error"] == pytest.approx(found.facts["head.weight"]["error"])
    assert main(["report", str(tmp_path / "absent")]) == 1
    assert "cannot be read" in capsys.readouterr().err
