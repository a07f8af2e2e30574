"""Pictures of layouts as SVG or PNG, without a plotting library (PNG is a zlib stream with a header).

Heads are drawn side by side, queries down and keys across; heads with equal patterns are drawn once.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from .errors import LayoutError

__all__ = ["png", "svg", "write_picture"]

_ON, _OFF, _PAPER = (38, 84, 124), (232, 236, 240), (255, 255, 255)
_WIDE = 480  # pixels of one head, about


def _distinct(layout: Tensor, limit: int | None) -> list[tuple[str, Tensor]]:
    """(heads, pattern) for every distinct pattern."""
    found: list[tuple[list[int], Tensor]] = []
    for h, head in enumerate(layout):
        for names, pattern in found:
            if torch.equal(pattern, head):
                names.append(h)
                break
        else:
            found.append(([h], head))
    return [(_named(names), pattern) for names, pattern in found[:limit]]


def _named(heads: list[int]) -> str:
    if len(heads) == 1:
        return f"head {heads[0]}"
    together = heads == list(range(heads[0], heads[-1] + 1))
    return f"heads {heads[0]}-{heads[-1]}" if together else "heads " + ", ".join(map(str, heads))


def _cell(blocks: int, cell: int | None) -> int:
    return cell if cell is not None else max(1, min(16, _WIDE // blocks))


def svg(layout: Tensor, block: int, heads: int | None = None, cell: int | None = None) -> str:
    """The picture as SVG text; runs of computed blocks in a row are one rectangle."""
    patterns, blocks = _distinct(layout, heads), layout.shape[-1]
    size, gap, top = _cell(blocks, cell), 16, 34
    side = blocks * size
    width, height = gap + len(patterns) * (side + gap), top + side + gap
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for n, (name, pattern) in enumerate(patterns):
        x0 = gap + n * (side + gap)
        density = pattern.sum().item() / pattern.numel()
        lines.append(f'<text x="{x0}" y="14">{name}: {100 * density:.1f} % of {blocks} x {blocks}</text>')
        lines.append(f'<text x="{x0}" y="28" fill="#777">blocks of {block}; queries down, keys across</text>')
        lines.append(f'<rect x="{x0}" y="{top}" width="{side}" height="{side}" fill="rgb{_OFF}"/>')
        for r, row in enumerate(pattern.tolist()):
            lines += [
                f'<rect x="{x0 + a * size}" y="{top + r * size}" width="{(b - a) * size}" height="{size}" '
                f'fill="rgb{_ON}"/>'
                for a, b in _runs(row)
            ]
    return "\n".join([*lines, "</svg>", ""])


def _runs(row: list[int]) -> list[tuple[int, int]]:
    """[begin, end) of every run of ones."""
    edges = [i for i in range(len(row) + 1) if bool(row[i] if i < len(row) else 0) != bool(row[i - 1] if i else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def png(layout: Tensor, heads: int | None = None, cell: int | None = None) -> bytes:
    """The picture as PNG bytes (no text)."""
    patterns, blocks = _distinct(layout, heads), layout.shape[-1]
    size, gap = _cell(blocks, cell), 8
    side = blocks * size
    colours = torch.tensor([_OFF, _ON], dtype=torch.uint8)
    page = torch.tensor(_PAPER, dtype=torch.uint8).repeat(side + 2 * gap, gap + len(patterns) * (side + gap), 1)
    for n, (_, pattern) in enumerate(patterns):
        grid = (pattern != 0).long().cpu().repeat_interleave(size, 0).repeat_interleave(size, 1)
        left = gap + n * (side + gap)
        page[gap : gap + side, left : left + side] = colours[grid]
    height, width, _ = page.shape
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in page)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_picture(layout: Tensor, block: int, path: Path, heads: int | None, cell: int | None) -> Path:
    """Write a picture in the format of the suffix. Raises `LayoutError` if that is neither .svg nor .png."""
    if path.suffix.lower() == ".svg":
        path.write_text(svg(layout, block, heads, cell), encoding="utf-8")
    elif path.suffix.lower() == ".png":
        path.write_bytes(png(layout, heads, cell))
    else:
        raise LayoutError(f"got a picture file {path.name!r}, expected a name ending in .svg or .png")
    return path
