"""A profile as one self-contained HTML page. Style and script come from `assets`; the figures are embedded as JSON."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any

from ..embedding import script_json

__all__ = ["profile_page"]


def profile_page(profile: dict[str, Any]) -> str:
    """The HTML page for the result of `FlopsProfiler.as_dict`."""
    assets = files("dsx_monitor.flops") / "assets"
    title = f"Flops profile of {profile['model']}, step {profile['step']}"
    replacements = {
        "@TITLE@": html.escape(title),
        "@SUMMARY@": "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in profile["summary"].items()
        ),
        "@STYLE@": (assets / "flops.css").read_text(encoding="utf-8"),
        "@SCRIPT@": (assets / "flops.js").read_text(encoding="utf-8"),
        "@DATA@": script_json(profile),
    }
    page = (assets / "flops.html").read_text(encoding="utf-8")
    return "".join(replacements.get(f"@{part}@", part) for part in page.split("@"))
