"""Draws the receipt that the guide shows: an audit of two ranks of which each keeps its own gradients.

python packages/dsx-verify/bench/receipt_picture.py [FILE]      # default docs/assets/receipt.svg
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

from dsx_testkit import run_ranks
from dsx_verify import Expected, Receipt, audit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from verify_systems import OPTIMIZERS, Net, pairs, step_of

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "assets" / "receipt.svg"
WIDTH, LINE = 900, 22
STYLE = """<style>text{font:14px system-ui,sans-serif;fill:#222}.code{font:13px monospace}
.bad{fill:#b3261e;font-weight:600}
.head{font-size:19px;font-weight:600}.rule{stroke:#8888}.page{fill:#fff}
@media (prefers-color-scheme: dark){text{fill:#e6e6e6}.bad{fill:#ff8a80}.page{fill:#1e2124}}</style>"""


def wrong(rank: int, world: int) -> Receipt:
    """The receipt of a model that no wrapper reduces."""
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    expected = Expected(Net, OPTIMIZERS["adamw"], accumulation=3)
    step = step_of(model, optimizer, expected)
    return audit(step, model, expected=expected, batches=pairs, optimizer=optimizer, raise_error=False)


def draw(receipt: Receipt) -> str:
    """The receipt as SVG, with the light and the dark palette."""
    fault = receipt.fault
    assert fault is not None
    lines = [("head", f"{receipt.system} on {receipt.ranks} ranks"), ("bad", f"{fault.kind}")]
    lines += [("", f"step {fault.step}, {fault.name}, rank {fault.rank}")]
    for line in fault.evidence:
        lines += [("code", line[start : start + 112]) for start in range(0, len(line), 112)]
    counts = [("compared", "values", "largest error, as a share of what is allowed")]
    for kind, count in receipt.compared.items():
        share = receipt.closest.get(kind)
        counts.append((kind, str(count), "" if share is None else f"{share:.1%}"))
    parts, y = [], 36
    for style, line in lines:
        parts.append(f'<text class="{style}" x="24" y="{y}">{html.escape(line)}</text>')
        y += LINE + (6 if style == "head" else 0)
    for row in counts:
        y += LINE
        parts.append(f'<line class="rule" x1="24" x2="700" y1="{y + 6}" y2="{y + 6}"/>')
        parts += [f'<text x="{x}" y="{y}">{html.escape(cell)}</text>' for x, cell in zip((24, 240, 320), row)]
    height = y + 30
    size = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="receipt of an audit"'
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{page}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PICTURE).write_text(draw(run_ranks(wrong, 2)[0]))
