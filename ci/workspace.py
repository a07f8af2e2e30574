"""The packages of the workspace, read from their own `pyproject.toml` files.

One list for everybody: the development environment, the clean-room check of one package, and a CI matrix
(`python ci/workspace.py` prints it as JSON). A new package needs no edit here. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTKIT = ROOT / "tests" / "testkit"


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file. Python 3.10 has no tomllib; the copy that pip carries does the same."""
    try:
        import tomllib
    except ModuleNotFoundError:
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Package:
    """One distribution of the workspace."""

    name: str
    path: Path
    requires: tuple[str, ...]  # requirement strings, ours and others'
    test_requires: tuple[str, ...]
    native: bool  # has a build hook that compiles

    @property
    def module(self) -> str:
        """The import name."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """The version, read from the file that the build reads too. The module's folder keeps its name in a renamed
        distribution.
        """
        (file,) = self.path.glob("src/*/_version.py")
        found = re.search(r'^__version__\s*=\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.M)
        if found is None:
            raise ValueError(f"{file}: got no __version__, expected one")
        return found.group(1)


def requirement_name(requirement: str) -> str:
    """`dsx-comm==0.1.0; python_version>'3'` -> `dsx-comm`."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}; expected a string like 'name>=1.0'")
    return match.group(1).lower().replace("_", "-")


def load(path: Path) -> Package:
    """Read one package folder."""
    meta = read_toml(path / "pyproject.toml")
    project = meta["project"]
    return Package(
        name=project["name"],
        path=path,
        requires=tuple(project.get("dependencies", ())),
        test_requires=tuple(meta.get("dependency-groups", {}).get("test", ())),
        native=(path / "hatch_build.py").is_file(),
    )


def all_packages() -> dict[str, Package]:
    """Every package under `packages/`, by distribution name, lower layers first."""
    found = {p.name: p for p in (load(d.parent) for d in sorted((ROOT / "packages").glob("*/pyproject.toml")))}
    ordered: dict[str, Package] = {}
    for name in found:
        for member in closure(name, found):
            ordered.setdefault(member, found[member])
    return ordered


def closure(name: str, packages: dict[str, Package]) -> list[str]:
    """`name` and every package of ours it needs, dependencies first."""
    seen: list[str] = []

    def visit(current: str) -> None:
        for requirement in packages[current].requires:
            dependency = requirement_name(requirement)
            if dependency in packages and dependency not in seen:
                visit(dependency)
        if current not in seen:
            seen.append(current)

    visit(name)
    return seen


def main() -> int:
    """Print the matrix: package, closure, whether it has native code."""
    packages = all_packages()
    rows = [{"package": n, "closure": closure(n, packages), "native": p.native} for n, p in packages.items()]
    json.dump({"include": rows}, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
