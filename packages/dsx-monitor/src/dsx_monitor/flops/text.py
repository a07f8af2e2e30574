"""A profile as text."""

from __future__ import annotations

from collections import defaultdict

from .counter import Totals
from .tree import Node
from .units import duration_to_string, flops_to_string, macs_to_string, number_to_string, params_to_string

__all__ = ["aggregate_text", "profile_text"]


def profile_text(root: Node, totals: Totals, step: int, summary: dict[str, str]) -> str:
    """The summary."""
    rows = {
        "profile step": str(step),
        **summary,
        "parameters": params_to_string(root.params),
        "forward MACs": macs_to_string(root.macs),
        "forward flops": flops_to_string(root.flops),
        "forward latency": duration_to_string(root.seconds),
    }
    if root.seconds > 0:
        rows["forward FLOPS"] = flops_to_string(root.flops / root.seconds)
    if totals.backward_flops:
        rows["backward flops, measured"] = flops_to_string(totals.backward_flops)
    if totals.recompute_flops:
        rows["of these, recomputation"] = flops_to_string(totals.recompute_flops)
    if totals.unknown:
        rows["not counted"] = ", ".join(f"{name} x{times}" for name, times in totals.unknown.most_common(12))
    width = max(map(len, rows)) + 2
    return "\nflops profile\n" + "".join(f"{name:{width}}{value}\n" for name, value in rows.items())


def aggregate_text(root: Node, module_depth: int, top_modules: int, detailed: bool) -> str:
    """Per depth the classes with the largest shares, down to `module_depth` (-1: the deepest); then the tree."""
    levels: dict[int, list[Node]] = defaultdict(list)
    for depth, node in root.walk():
        levels[depth].append(node)
    deepest = max(levels) if module_depth < 0 else min(module_depth, max(levels))
    lines = ["\nmost of each depth\n"]
    for depth in range(deepest + 1):
        lines.append(f"depth {depth}:\n")
        for title, key, show in (
            ("params", lambda n: n.params, params_to_string),
            ("MACs", lambda n: n.macs, macs_to_string),
            ("fwd latency", lambda n: n.seconds, duration_to_string),
        ):
            sums: dict[str, float] = defaultdict(float)
            for node in levels[depth]:
                sums[node.kind] += key(node)
            best = sorted(sums.items(), key=lambda item: -item[1])[:top_modules]
            lines.append(f"    {title:12}{', '.join(f'{kind}: {show(value)}' for kind, value in best)}\n")
    return "".join(lines) + (_tree(root) if detailed else "")


def _tree(root: Node) -> str:
    lines = ["\nmodules: params, % params, MACs, % MACs, latency, % latency, FLOPS\n"]
    for depth, node in root.walk():
        rate = node.flops / node.seconds if node.seconds > 0 else 0.0
        figures = (
            params_to_string(node.params),
            _share(node.params, root.params),
            macs_to_string(node.macs),
            _share(node.macs, root.macs),
            duration_to_string(node.seconds),
            _share(node.seconds, root.seconds),
            f"{number_to_string(rate)}FLOPS",
        )
        times = f" x{node.calls}" if node.calls > 1 else ""
        lines.append(f"{'  ' * depth}{node.name or '(model)'} {node.kind}{times}: {', '.join(figures)}\n")
    return "".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "0.00%"
