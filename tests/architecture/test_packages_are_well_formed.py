"""Every package has the shape that the workspace promises: parts that install and work alone."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages, closure, load, read_toml, requirement_name  # noqa: E402

PACKAGES = all_packages()
LAYER = {
    **{"dsx-compat": 4, "dsx": 3, "dsx-zero": 2, "dsx-pipe": 2, "dsx-moe": 2, "dsx-data": 2},
    **{"dsx-compress": 2, "dsx-comm": 1, "dsx-checkpoint": 1.5, "dsx-launch": 2.5, "dsx-plan": 2.75},
    **{"dsx-activations": 2, "dsx-verify": 2, "dsx-core": -1},
}
PAGES = {".js", ".css", ".html"}


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_complete(name):
    path = PACKAGES[name].path
    for part in ("README.md", "CHANGELOG.md", "LICENSE", "tests", f"src/{PACKAGES[name].module}/py.typed"):
        assert (path / part).exists(), f"{name} has no {part}"
    meta = read_toml(path / "pyproject.toml")
    assert meta["build-system"]["build-backend"] == "hatchling.build"
    assert not any(r.startswith("torch") for r in meta["build-system"]["requires"]), (
        "torch in the build pulls gigabytes"
    )
    assert set(meta.get("tool", {})) <= {"hatch"}, "tool settings live in the root pyproject only"


@pytest.mark.parametrize("name", PACKAGES)
def test_dependencies_point_downwards_and_reach_the_gpu_machine(name):
    package = PACKAGES[name]
    for requirement in package.requires:
        other = requirement_name(requirement)
        if other in PACKAGES:
            assert LAYER.get(other, 0) < LAYER.get(name, 0), f"{name} must not need {other}"
        if other == "torch":
            assert requirement.startswith("torch>=2.11,")


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_a_package_that_writes_safetensors_gets_numpy(package):
    """`safetensors.torch` imports numpy when it writes, and neither it nor torch declares it."""
    sources = (path.read_text() for path in (package.path / "src").rglob("*.py"))
    if any(re.search(r"^\s*(from|import) safetensors[. ]", text, re.M) for text in sources):
        needed = {requirement_name(r) for name in closure(package.name, PACKAGES) for r in PACKAGES[name].requires}
        assert {"safetensors", "numpy"} <= needed


def test_readme_shows_a_runnable_example_in_every_package():
    for name, package in PACKAGES.items():
        assert "```python" in (package.path / "README.md").read_text(), f"{name}: README has no example"


def test_no_init_files_below_tests():
    # importlib mode and packages below tests/ together make equal module names overwrite each other
    assert [
        p
        for p in [*ROOT.glob("packages/*/tests/**/__init__.py"), *ROOT.glob("tests/**/__init__.py")]
        if "src" not in p.parts
    ] == []


def test_lines_of_pages_and_their_scripts_have_120_columns_at_most():
    """Python lines are ruff's, native ones clang-format's."""
    assets = [p for folder in ("packages", "docs") for p in (ROOT / folder).rglob("assets/*") if p.suffix in PAGES]
    assert {p.suffix for p in assets} == PAGES
    for path in assets:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 120, f"{path.relative_to(ROOT)}:{number} has {len(line)} columns"


def test_test_files_have_unique_names():
    names = [p.name for p in [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


def test_closure_is_dependencies_first(tmp_path):
    for name, needs in (("a", []), ("b", ["a>=1"]), ("c", ["b", "a", "torch"])):
        folder = tmp_path / name
        folder.mkdir()
        listed = ", ".join(f'"{n}"' for n in needs)
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\ndependencies = [{listed}]\n')
    packages = {n: load(tmp_path / n) for n in "abc"}
    assert closure("c", packages) == ["a", "b", "c"]
    assert closure("a", packages) == ["a"]


def test_hatch_environments_know_every_package_and_what_its_tests_need():
    hatch = read_toml(ROOT / "pyproject.toml")["tool"]["hatch"]["envs"]
    named = {requirement_name(r) for r in hatch["default"]["dependencies"]}
    needed = {requirement_name(r) for p in PACKAGES.values() for r in p.test_requires}
    assert needed <= named, f"the default environment of the root pyproject lacks {sorted(needed - named)}"
    (matrix,) = hatch["solo"]["matrix"]
    assert set(matrix["package"]) == set(PACKAGES)
    assert set(hatch["solo"]["sources"]) == set(PACKAGES) - {"dsx-compat"}


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_what_a_package_index_shows_is_complete(package):
    project = read_toml(package.path / "pyproject.toml")["project"]
    assert project["authors"] and project["keywords"] and project["license-files"] == ["LICENSE"]
    assert set(project["urls"]) == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    found = " ".join(project["classifiers"])
    for part in ("Development Status", "Operating System", "Python :: 3.10", "Topic", "Typing :: Typed"):
        assert part in found
    torch = [r for r in project["dependencies"] if requirement_name(r) == "torch"]
    assert all("<" in r for r in torch), "torch needs an upper bound: private names of newer releases are not tested"
    assert "END OF TERMS AND CONDITIONS" in (package.path / "LICENSE").read_text()


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_links_of_a_readme_work_outside_the_repository(package):
    links = re.findall(r"\]\(([^)\s]+)\)", (package.path / "README.md").read_text())
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


LOWER = ("comm", "zero", "ops", "nvme", "sparse-attn", "monitor", "pipe", "moe", "data", "compress")
MOST_PUBLIC_NAMES = 373  # of the lower packages together: each is documented, tested and promised


def test_the_lower_packages_promise_few_names():
    """A name that only the package itself and its tests use is no public name: its module has it."""
    counts = {}
    for name in LOWER:
        source = (PACKAGES[f"dsx-{name}"].path / "src" / PACKAGES[f"dsx-{name}"].module / "__init__.py").read_text()
        assigned = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign)]
        (listed,) = [node.value for node in assigned if getattr(node.targets[0], "id", "") == "__all__"]
        counts[name] = len(ast.literal_eval(listed))
    assert 0 < sum(counts.values()) <= MOST_PUBLIC_NAMES, counts
