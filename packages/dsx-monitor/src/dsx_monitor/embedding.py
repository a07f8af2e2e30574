"""Embeds data in HTML pages."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["script_json"]


def script_json(value: Any) -> str:
    """`value` as JSON for the inside of a `<script>` element.

    Every "<" is written as an escape, as a name may hold "</script>", which ends the element, or "<!--" and "<script",
    after which the next "</script>" does not end it.
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
