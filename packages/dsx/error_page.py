"""Build hook: the page of error codes travels with the package, for `dsx explain` where there is no checkout.

The page is written in docs/reference/errors.md only. An sdist and a wheel that are built in a checkout get it as
`dsx/error_codes.md`; a wheel that is built from an sdist finds it among the sources. An editable installation reads the
page in the checkout.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

IN_CHECKOUT = Path("docs", "reference", "errors.md")
IN_WHEEL = "dsx/error_codes.md"


class ErrorPageHook(BuildHookInterface):
    """Adds the page to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files are collected."""
        root = Path(self.root)
        place = IN_WHEEL if self.target_name == "wheel" else f"src/{IN_WHEEL}"
        page = root.parent.parent / IN_CHECKOUT
        if page.is_file() and version != "editable":
            build_data["force_include"][str(page)] = place
        elif not page.is_file() and not (root / "src" / IN_WHEEL).is_file():
            raise FileNotFoundError(f"{page} is missing, the page of error codes; build in a whole checkout")
