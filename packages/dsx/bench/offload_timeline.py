"""Draws one step of a run with offload: what computes, gathers, reduces and moves beside what, as an SVG.

    python packages/dsx/bench/offload_timeline.py --out docs/assets/offload-timeline.svg

Two ranks train a small GPT at stage 3, with masters and optimizer states on disk and gradients in host memory; the
`timeline` section traces one step. The picture shows rank 0. The bars are times of that run, not figures to compare.
The optimizer is torch's: on a CPU that of dsx writes the parameters in its own pass, and no copy to the device is left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

SHOWN = {
    "compute": "#4c78a8",
    "gather": "#f58518",
    "reduce": "#e45756",
    "device-host": "#72b7b2",
    "disk, read": "#54a24b",
    "disk, write": "#b279a2",
}
"""Rows of the picture, from top to bottom, and their colours."""

WIDTH, LEFT, RIGHT, ROW, TOP = 960, 90, 12, 28, 26


def train(rank: int, world: int, folder: str, layers: int, width: int) -> None:
    """Train six steps, of which the last but one is traced."""
    import dsx
    import torch
    from dsx_testkit.benches import GPT, batch

    torch.set_num_threads(1)
    place = {"device": "nvme", "nvme_path": os.path.join(folder, "swap")}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": place,
            "sub_group_size": 1 << 18,
        },
        "bf16": {"enabled": True},
        "timeline": {"enabled": True, "start_step": 4, "steps": 1, "output_path": os.path.join(folder, "run")},
        "steps_per_print": None,
    }
    engine, *_ = dsx.initialize(model=GPT(width, layers), config=config)
    for step in range(6):
        engine.backward(engine(*batch(step, rank, size=2, length=64)))
        engine.step()
    engine.destroy()


def row_of(event: dict[str, Any]) -> str:
    """The row of a span: its lane; of transfers to and from disk their direction."""
    return f"disk, {event['name'].split()[0]}" if event["cat"] == "host-disk" else event["cat"]


def bars_of(trace: Path) -> dict[str, list[tuple[float, float, str]]]:
    """By row, the times of rank 0 in which something was under way: begin, end (ms since the first), and what. Spans
    that overlap become one bar, except those of the computation.
    """
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    spans = sorted((e for e in events if e["ph"] == "X" and e["pid"] == 0), key=lambda e: (e["ts"], -e["dur"]))
    bars: dict[str, list[tuple[float, float, str]]] = {row: [] for row in SHOWN}
    first = min(e["ts"] for e in spans)
    for e in spans:
        begin, found = (e["ts"] - first) / 1e3, bars.get(row_of(e))
        if found is None:
            continue
        end = begin + e["dur"] / 1e3
        if found and begin <= found[-1][1] and e["cat"] != "compute":
            found[-1] = (found[-1][0], max(end, found[-1][1]), found[-1][2])
        else:
            found.append((begin, end, e["name"]))
    return bars


def picture(bars: dict[str, list[tuple[float, float, str]]]) -> str:
    """The SVG."""
    length, height = max(end for found in bars.values() for _, end, _ in found), TOP + ROW * len(bars)
    scale, parts = (WIDTH - LEFT - RIGHT) / length, []
    for place, (row, found) in enumerate(bars.items()):
        y = TOP + ROW * place
        parts.append(f'<text x="8" y="{y + 14}">{escape(row)}</text>')
        for begin, end, name in found:
            x, width = LEFT + begin * scale, max(0.6, (end - begin) * scale)
            title = escape(f"{name}: {end - begin:.2f} ms")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 8}" fill="{SHOWN[row]}">'
                f"<title>{title}</title></rect>"
            )
            if row == "compute" and width > 60:
                parts.append(f'<text x="{x + 4:.1f}" y="{y + 14}" fill="#fff">{escape(name)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        f' font-size="12"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="{LEFT}" y="16">one step, {length:.0f} ms, rank 0 of 2</text>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def main() -> None:
    """Train, and draw."""
    from dsx_testkit import run_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="offload-timeline.svg")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--folder", help="on a disk, not tmpfs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run_ranks(train, 2, folder, args.layers, args.width)
        bars = bars_of(Path(folder) / "run" / "trace.json")
    Path(args.out).write_text(picture(bars), encoding="utf-8")
    print(f"{args.out}: {', '.join(f'{len(found)} x {row}' for row, found in bars.items())}")


if __name__ == "__main__":
    main()
