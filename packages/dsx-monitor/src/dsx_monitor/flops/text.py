"""A profile as text: the summary, the largest modules at each depth, and the module tree with its figures."""

from __future__ import annotations

from collections import defaultdict

from .tree import Node
from .units import duration_to_string, flops_to_string, macs_to_string, params_to_string

__all__ = ["aggregate_text", "profile_text"]

_NOTATION = (
    "MACs: multiply-accumulates; flops: floating-point operations; FLOPS: flops per second;\nGPU: this process and its"
    " device; latencies and operations are those of the whole step on this process; backward is measured, not assumed\n"
)


def profile_text(rows: dict[str, str], step: int) -> str:
    """The summary."""
    width = max(map(len, rows)) + 2
    body = "".join(f"{name + ':':{width}}{value}\n" for name, value in rows.items())
    return f"\n{' dsx flops profiler '.center(80, '-')}\nprofile summary at step {step}\n{_NOTATION}\n{body}"


def aggregate_text(root: Node, module_depth: int, top_modules: int, detailed: bool) -> str:
    """For each depth down to `module_depth` (-1: the deepest) the classes with the largest shares; then the tree."""
    levels: dict[int, list[Node]] = defaultdict(list)
    for depth, node in root.walk():
        levels[depth].append(node)
    deepest = max(levels) if module_depth < 0 else min(module_depth, max(levels))
    lines = [f"\n{' aggregated profile per GPU '.center(80, '-')}\n"]
    lines.append(f"top {top_modules} module classes in params, MACs and forward latency at each depth\n")
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
    title = " detailed profile per GPU ".center(80, "-")
    lines = [
        f"\n{title}\n",
        "module class: params, % params, MACs, % MACs, fwd latency, % fwd latency, fwd FLOPS, bwd latency\n",
    ]
    for depth, node in root.walk():
        rate = node.flops / node.seconds if node.seconds > 0 else 0.0
        figures = [
            params_to_string(node.params),
            _share(node.params, root.params),
            macs_to_string(node.macs),
            _share(node.macs, root.macs),
            duration_to_string(node.seconds),
            _share(node.seconds, root.seconds),
            flops_to_string(rate),
        ]
        if root.backward_seconds:
            figures.append(f"bwd {duration_to_string(node.backward_seconds)}")
        times = f" x{node.calls}" if node.calls > 1 else ""
        lines.append(f"{'  ' * depth}{node.name or '(model)'} {node.kind}{times}: {', '.join(figures)}\n")
    return "".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "0.00%"
