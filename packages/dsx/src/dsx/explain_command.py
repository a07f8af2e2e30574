"""``dsx explain``: say what the code of an error or a warning means, and what to do.

It prints sections of docs/reference/errors.md. An installed package has a copy of that page, which the build makes
(`error_page.py`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from dsx_core import CommandParser

from ._version import __version__

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


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx explain") -> int:
    """Print the sections of the codes; return 0, or 2 if one of them is no code of dsx."""
    parser = CommandParser(
        prog=prog, description="Say what an error or a warning means, and what to do.", version=f"dsx {__version__}"
    )
    known = sections()
    first, last = min(known), max(known)
    parser.add_argument("code", nargs="+", help=f"the code at the end of the message, from {first} to {last}")
    parser.add_argument("--json", action="store_true", help="print JSON: the text of each code")
    args = parser.parse_args(argv)
    codes = [_code_in(word) for word in args.code]
    for code in codes:
        if code not in known:
            sys.stderr.write(f"{prog}: got {code!r}, expected a code of dsx, from {first} to {last}\n")
            return 2
    texts = {code: known[code] for code in codes}
    sys.stdout.write(json.dumps(texts, indent=2) + "\n" if args.json else "\n".join(texts[code] for code in codes))
    return 0


def _code_in(word: str) -> str:
    """The code that somebody has copied out of a message, with what stands around it."""
    found = re.fullmatch(r"\[?(?:.*errors(?:\.md)?#)?(?:dsx)?(\d{3})\]?[.,;]?", word.strip(), re.I)
    return f"DSX{found[1]}" if found else word
