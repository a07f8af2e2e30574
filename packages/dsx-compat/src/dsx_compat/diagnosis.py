"""The report of `dsx doctor` about `deepspeed`: which package provides it, and which one hides it."""

from __future__ import annotations

from dsx.doctor import BROKEN, OK, WARNING, Finding

from ._version import DEEPSPEED_VERSION
from .activation import SITE, has_metadata, mixed_files, on_path, others

__all__ = ["deepspeed_found"]

INSTALL = "in the checkout of dsx: pip install --force-reinstall --no-deps ./packages/dsx-compat"
REINSTALL = "pip uninstall -y deepspeed dsx-compat, then " + INSTALL


def deepspeed_found() -> list[Finding]:
    """One finding about `import deepspeed`, and one for each other installation of it."""
    found = []
    rivals = others()
    first = next((rival for rival in rivals if rival.precedes), None)
    if first is not None:
        hint = "pip uninstall -y deepspeed; or dsx_compat.activate() at the top of the script"
        found.append(Finding("compatibility", "import deepspeed", f"gives {first}, not dsx's", WARNING, hint))
    elif on_path() and not has_metadata():
        text = "gives dsx's, but its entry among the installed packages was removed, which Accelerate looks for"
        found.append(Finding("compatibility", "import deepspeed", text, WARNING, INSTALL))
    elif on_path():
        found.append(Finding("compatibility", "import deepspeed", f"gives dsx's, as deepspeed {DEEPSPEED_VERSION}", OK))
    else:
        hint = f"{INSTALL}; or dsx_compat.activate() in the script ({SITE})"
        found.append(Finding("compatibility", "import deepspeed", "dsx's is not on sys.path", WARNING, hint))
    for rival in rivals:
        if rival is not first:
            hint = "pip uninstall -y deepspeed"
            found.append(Finding("compatibility", "another deepspeed", f"{rival}; dsx's comes first", WARNING, hint))
    if mixed := mixed_files():
        text = f"{len(mixed)} files of another installation among dsx-compat's ({mixed[0]}, ...)"
        found.append(Finding("compatibility", "mixed files", text, BROKEN, REINSTALL))
    return found
