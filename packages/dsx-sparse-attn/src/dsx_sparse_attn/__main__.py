"""`dsx sparse`: draw layouts of block-sparse attention, and report which kernels run here.

It is also `python -m dsx_sparse_attn`:

python -m dsx_sparse_attn                                  the report (--json for machines)
python -m dsx_sparse_attn show bigbird --seq 2048 --block 64 --out layout.svg
python -m dsx_sparse_attn show fixed --set num_local_blocks=8 --set attention=unidirectional --out layout.png
python -m dsx_sparse_attn show --config training.json --out layout.svg
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, backend_status, native_status
from .errors import LayoutError


def report() -> str:
    """The status as lines of text."""
    s = native_status()
    lines = [f"dsx-sparse-attn {__version__}, torch {s['torch']}"]
    if s["native"]:
        lines.append(
            f"native CPU kernels  yes: {s['isa']} in use; this CPU can run {', '.join(s['isas'])} (DSX_ISA chooses)"
        )
    else:
        lines.append(f"native CPU kernels  NO: {s['reason']}")
    lines.append(f"threads             {s['threads']['count']} ({s['threads']['backend']})")
    if s["sanitizer"]:
        lines.append(f"sanitizer           {s['sanitizer']}")
    for name, reason in backend_status().items():
        lines.append(f"backend {name:11} {'no: ' + reason if reason else 'yes'}")
    return "\n".join(lines)


def _section(arguments: argparse.Namespace) -> dict[str, Any]:
    section: dict[str, Any] = {}
    if arguments.config:
        whole = json.loads(Path(arguments.config).read_text(encoding="utf-8"))
        section = dict(whole.get("sparse_attention", whole))
    if arguments.mode:
        section["mode"] = arguments.mode
    if arguments.block:
        section["block"] = arguments.block
    for setting in arguments.set:
        key, equals, value = setting.partition("=")
        if not equals:
            raise LayoutError(f"got --set {setting}, expected key=value")
        try:
            section[key] = json.loads(value)
        except json.JSONDecodeError:
            section[key] = value
    return section


def show(arguments: argparse.Namespace) -> str:
    """Draw the layout that the arguments describe; returns one line about it."""
    from pydantic import ValidationError  # lazy import: the report needs no pydantic

    from .config import SparseAttentionConfig

    random.seed(arguments.seed)
    try:
        config = SparseAttentionConfig(**_section(arguments))
    except ValidationError as error:
        raise LayoutError(str(error)) from error
    # A section without num_random_blocks has no random blocks, as in training. A pattern that is only named has the
    # defaults of its class.
    pattern = config.sparsity_config(arguments.heads, defaults="section" if arguments.config else "class")
    layout = pattern.make_layout(arguments.seq)
    path = layout.plot(arguments.out, cell=arguments.cell)
    _, blocks, _ = layout.shape
    if arguments.show_json:
        found = {"mode": config.mode, "heads": arguments.heads, "blocks": int(blocks), "block": layout.block}
        return json.dumps({**found, "density": float(layout.density), "seed": arguments.seed, "written": str(path)})
    return (
        f"{config.mode}: {arguments.heads} heads of {blocks} x {blocks} blocks of {layout.block}, "
        f"density {100 * layout.density:.2f} % (seed {arguments.seed}); wrote {path}"
    )


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Report, or draw a layout.")
    parser.add_argument("-V", "--version", action="version", version=f"dsx-sparse-attn {__version__}")
    parser.add_argument("--json", action="store_true", help="the report for machines")
    commands = parser.add_subparsers(dest="command")
    drawing = commands.add_parser("show", help="draw a layout into a PNG or SVG file")
    drawing.add_argument("mode", nargs="?", help="dense, fixed, variable, bigbird, bslongformer or local")
    drawing.add_argument("--config", help="JSON file with a sparse_attention section (or that section alone)")
    drawing.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the section")
    drawing.add_argument("--seq", type=int, default=1024, help="sequence length (default 1024)")
    drawing.add_argument("--heads", type=int, default=4, help="heads (default 4)")
    drawing.add_argument("--block", type=int, help="block size")
    drawing.add_argument("--seed", type=int, default=0, help="seed of random blocks (default 0)")
    drawing.add_argument("--cell", type=int, help="pixels per block")
    drawing.add_argument("--json", action="store_true", dest="show_json", help="print JSON")
    drawing.add_argument("--out", default="layout.svg", help="file to write, .svg or .png (default layout.svg)")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m dsx_sparse_attn") -> int:
    """Entry point."""
    arguments = _parser(prog).parse_args(argv)
    if arguments.command != "show":
        print(json.dumps({**native_status(), "backends": backend_status()}, indent=1) if arguments.json else report())
        return 0
    try:
        print(show(arguments))
    except (LayoutError, OSError, json.JSONDecodeError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
