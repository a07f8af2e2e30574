"""The pictures of the documentation that the planner makes: `python tools/pictures.py` writes them into docs/assets.

They are drawn from plans, not by hand, so that they show what the engine does. `--check` writes nothing and fails
where a picture is not what the planner says now. Each has both palettes; the reader's system chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
LANES = {"compute": "compute", "gather": "all-gather", "reduce": "reduce-scatter", "waiting": "compute waits"}
KINDS = {"all_gather": "gather", "reduce_scatter": "reduce"}
WIDTH, LEFT, TOP, ROW = 880, 130, 54, 34
PALETTE = {
    "forward": ("#2a78d6", "#62a4f0"), "backward": ("#1a9a6c", "#4cc795"), "step": ("#b36b00", "#e5a64a"),
    "gather": ("#8256c9", "#b493ec"), "reduce": ("#c2456b", "#ee8aa8"),
    "waiting": ("#6b7280", "#a3aab5"),
}  # fmt: skip
STYLE = """<style>
text{{font:13px system-ui,sans-serif;fill:#222}} .axis{{stroke:#999}} .lane{{fill:#f1f3f5}}
{light}
@media (prefers-color-scheme: dark){{text{{fill:#e6e6e6}} .axis{{stroke:#777}} .lane{{fill:#2b2f33}}
{dark}
}}
</style>"""


def gpt_blocks() -> Any:
    """A model of six blocks with the sizes of a small transformer's matrices."""
    from torch import nn

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))

    return nn.Sequential(*(block() for _ in range(6)))


def stage_3_step() -> str:
    """One step at stage 3 on eight GPUs: gathers run ahead of the computation, reductions follow it."""
    import torch
    from dsx.planning import plan

    config = {
        "train_micro_batch_size_per_gpu": 4096,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    found = plan(gpt_blocks, config, world_size=8, machine="H100-SXM", batch=torch.zeros(4096, 2048))
    return lanes("A planned step at stage 3: six blocks on eight H100", found.timeline)


def long_sequences() -> str:
    """Memory over the length of a sequence, by the settings that divide it or move it to the host."""
    import dsx_activations
    import torch
    from dsx.planning import longest
    from dsx_plan.reaching import memory_picture
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(2048, 3072, bias=False), nn.Linear(2048, 2048)
            self.mlp = nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(x).split([2048, 512, 512], -1)
            q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + dsx_activations.run_in_tiles(self.mlp, x, tiles=8)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.recomputes = nn.ModuleList(Block() for _ in range(4)), False

        def gradient_checkpointing_enable(self) -> None:
            self.recomputes = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = dsx_activations.checkpoint(block, x) if self.recomputes else block(x)
            return x[:, ::64].float().square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    }
    found = longest(
        Blocks, config, world_size=8, machine="H100-SXM", start=1 << 16,
        batch=lambda length: torch.empty(1, length, 2048, dtype=torch.bfloat16, device="meta"),
    )  # fmt: skip
    return memory_picture(found)


def lanes(title: str, timeline: Iterable[tuple[str, str, float, float]]) -> str:
    """A picture of spans (lane, name, start, end in seconds), one row per lane, with an axis in milliseconds."""
    spans = [(KINDS.get(name.split()[0], lane), name, start, end) for lane, name, start, end in timeline]
    length = max(end for *_, end in spans)
    shown = [lane for lane in LANES if any(of == lane for of, *_ in spans)]
    height = TOP + ROW * len(shown) + 40
    scale = (WIDTH - LEFT - 20) / length
    light, dark = (
        "\n".join(f".{name}{{fill:{colours[which]}}}" for name, colours in PALETTE.items()) for which in (0, 1)
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
        STYLE.format(light=light, dark=dark),
        f'<text x="10" y="20" font-weight="600">{title}</text>',
    ]
    used = dict.fromkeys(name for lane, name, _, _ in spans if lane == "compute" and name in PALETTE)
    for number, name in enumerate(used):
        lines.append(f'<rect class="{name}" x="{LEFT + 110 * number}" y="32" width="12" height="12"/>')
        lines.append(f'<text x="{LEFT + 110 * number + 18}" y="43">{name}</text>')
    for row, lane in enumerate(shown):
        y = TOP + ROW * row
        lines.append(f'<text x="10" y="{y + 18}">{LANES[lane]}</text>')
        lines.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{ROW - 8}"/>')
        for of, name, start, end in spans:
            if of == lane:
                kind, width = (name if name in PALETTE else lane), max(0.6, (end - start) * scale)
                place = f'x="{LEFT + start * scale:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 8}"'
                lines.append(f'<rect class="{kind}" {place}/>')
    y = TOP + ROW * len(shown)
    for part in range(5):
        x = LEFT + (WIDTH - LEFT - 20) * part / 4
        lines.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 6}"/>')
        lines.append(f'<text x="{x:.1f}" y="{y + 22}" text-anchor="middle">{1000 * length * part / 4:.1f} ms</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


PICTURES = {"step-stage3.svg": stage_3_step, "long-sequences.svg": long_sequences}


def main() -> int:
    """Write or check all pictures; returns 1 if one is not up to date."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a picture is out of date")
    check = parser.parse_args().check
    old = []
    for name, draw in PICTURES.items():
        text, path = draw(), ASSETS / name
        if check and (not path.is_file() or path.read_text() != text):
            old.append(name)
        elif not check:
            path.write_text(text)
    if old:
        print(f"out of date: {', '.join(old)}; run python tools/pictures.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
