"""Pictures of layouts: the pixels are the blocks; the command line writes them."""

import json
import struct
import xml.etree.ElementTree as ET
import zlib

import pytest
import torch
from dsx_sparse_attn import FixedSparsityConfig, Layout
from dsx_sparse_attn.__main__ import main
from dsx_sparse_attn.errors import LayoutError


def pixels(data):
    """Decode the PNG by the standard: [height][width] of (r, g, b)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        parts[kind] = parts.get(kind, b"") + body
        at += 12 + length
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert (depth, colour) == (8, 2)
    raw, step = zlib.decompress(parts[b"IDAT"]), 1 + 3 * width
    rows = [raw[r * step : (r + 1) * step] for r in range(height)]
    assert all(r[0] == 0 for r in rows)
    return [[tuple(r[1 + 3 * x : 4 + 3 * x]) for x in range(width)] for r in rows]


def test_png_shows_the_blocks(tmp_path):
    layout = Layout.from_mask(torch.rand(5, 5) < 0.5, 16)
    picture = pixels(layout.plot(tmp_path / "a.png", cell=3).read_bytes())
    assert len(picture) == 5 * 3 + 16 and len(picture[0]) == 5 * 3 + 16
    for r in range(5):
        for c in range(5):
            dark = picture[8 + 3 * r + 1][8 + 3 * c + 1] == (38, 84, 124)
            assert dark == bool(layout[0, r, c])


def test_svg_draws_each_distinct_head_once(tmp_path):
    layout = FixedSparsityConfig(4, different_layout_per_head=True, num_different_global_patterns=2).make_layout(128)
    tree = ET.parse(layout.plot(tmp_path / "a.svg", cell=4))
    texts = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert any("heads 0, 2" in t for t in texts) and any("heads 1, 3" in t for t in texts)
    area = sum(
        float(r.get("width")) * float(r.get("height"))
        for r in tree.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") == "rgb(38, 84, 124)"
    )  # fmt: skip
    assert area == 16 * int(layout[:2].sum())
    assert layout._repr_svg_().startswith("<svg")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(LayoutError, match=r"\.svg or \.png"):
        FixedSparsityConfig(1).make_layout(64).plot(tmp_path / "a.pdf")


def test_show_writes_a_picture_and_says_the_density(tmp_path, capsys):
    out = tmp_path / "b.svg"
    assert (
        main(["show", "bigbird", "--seq", "512", "--block", "32", "--set", "num_random_blocks=2", "--out", str(out)])
        == 0
    )
    text = capsys.readouterr().out
    assert "16 x 16 blocks of 32" in text and "density" in text and out.is_file()
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"train_batch_size": 8, "sparse_attention": {"mode": "local", "block": 64}}))
    assert main(["show", "--config", str(config), "--out", str(tmp_path / "c.png")]) == 0
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def drawn(path):
    """Blocks of the first head of an SVG, as pixels of one: {(row, column)}."""
    blocks = set()
    for r in ET.parse(path).iter("{http://www.w3.org/2000/svg}rect"):
        if r.get("fill") == "rgb(38, 84, 124)":
            x, y, width = (int(r.get(name)) for name in ("x", "y", "width"))
            blocks |= {(y - 34, x - 16 + i) for i in range(width)}
    return blocks


def test_show_bigbird_draws_random_blocks_by_the_seed(tmp_path):
    def show(*more):
        out = tmp_path / "a.svg"
        arguments = [
            "show",
            "bigbird",
            "--seq",
            "512",
            "--block",
            "16",
            "--heads",
            "1",
            "--cell",
            "1",
            "--out",
            str(out),
        ]
        assert main([*arguments, *more]) == 0
        return drawn(out)

    fixed = {(r, c) for r in range(32) for c in range(32) if abs(r - c) <= 1 or r == 0 or c == 0}
    assert fixed < show() == show() != show("--seed", "1")
    assert show("--set", "num_random_blocks=0") == fixed
    section = tmp_path / "section.json"
    section.write_text(json.dumps({"sparse_attention": {"mode": "bigbird"}}))
    assert show("--config", str(section)) == fixed, "a section without num_random_blocks has none, in training too"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "bigbrd"],
        ["show", "--seq", "100"],
        ["show", "--set", "x"],
        ["show", "--out", "a.pdf"],
        ["show", "--config", "none.json"],
    ],
)
def test_show_explains_mistakes(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("python -m dsx_sparse_attn: ")
