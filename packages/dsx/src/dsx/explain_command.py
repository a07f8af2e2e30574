"""``dsx explain CODE``: what an error or a warning means and what to do, from the page of error codes.

The page is docs/reference/errors.md. An installed package has a copy, which the build makes (`error_page.py`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "sections"]

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "error_codes.md"
_SECTION = re.compile(r"^### (DSX\d{3})\n(.*?)(?=^##|\Z)", re.S | re.M)


def sections() -> dict[str, str]:
    """The text of the page for every code, with the code as its first line.

    Raises:
        FileNotFoundError: the package was put together without its page.
    """
    page = _INSTALLED if _INSTALLED.is_file() else _HERE.parents[3] / "docs" / "reference" / "errors.md"
    return {code: f"{code}\n{text.rstrip()}\n" for code, text in _SECTION.findall(page.read_text(encoding="utf-8"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the sections of the codes; return 0, or 2 if one of them is no code of dsx."""
    parser = argparse.ArgumentParser(
        prog="dsx explain", description="Say what an error or a warning means, and what to do."
    )
    known = sections()
    first, last = min(known), max(known)
    parser.add_argument("code", nargs="+", help=f"the code at the end of the message, from {first} to {last}")
    codes = [_code_in(word) for word in parser.parse_args(argv).code]
    for code in codes:
        if code not in known:
            sys.stderr.write(f"dsx explain: got {code!r}, expected a code of dsx, from {first} to {last}\n")
            return 2
    sys.stdout.write("\n".join(known[code] for code in codes))
    return 0


def _code_in(word: str) -> str:
    """The code that somebody has copied out of a message, with what stands around it."""
    found = re.fullmatch(r"\[?(?:docs:\s*)?(?:errors#)?(?:dsx)?(\d{3})\]?[.,;]?", word.strip(), re.I)
    return f"DSX{found[1]}" if found else word
