"""What the site shows beyond the files in docs/: READMEs, changelogs, example programs, API pages, the version.

The idea: these pages are made while the site is built, from the files that are already there, so that nothing is
written twice. An API page lists the public names of a package (its `__all__`) one by one, so that the page and the
names cannot differ; mkdocstrings fills in signature and docstring.

Left out: pages per version of the past. A checkout builds the pages of its own version, and each page says which.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from workspace import all_packages  # noqa: E402

# Modules that users import from, beside the packages themselves.
MODULES = (
    *("dsx.checkpoint", "dsx.config", "dsx.lr_schedules", "dsx.utils"),
    *("dsx_comm.errors", "dsx_compat.accelerator"),
)
FIRST = ("initialize", "Engine")  # what a reader of dsx's page looks for; errors come last
RARELY_SOUGHT = re.compile(
    r"decisions/|log\.md|packages/.*-changes\.md|CONTRIBUTING|contributing/|architecture\.md|figures/"
)
OFTEN_SOUGHT = re.compile(r"(start|guides|end-to-end)/|config\.md")
CODE = re.compile(r"^### (DSX\d{3})\n\n\*\*(.+?)\.?\*\*(?: \((`\w+`(?:, `\w+`)*)\)\.?)?$", re.M)
PICTURE = re.compile(r"!\[([^\]]*)\]\(https://raw\.githubusercontent\.com/dsx-project/dsx/main/([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def sources() -> dict[str, Path]:
    """Every documented module with the file that lists its public names."""
    found = {}
    for package in all_packages().values():
        for init in sorted((package.path / "src").glob("*/__init__.py")):
            found[init.parent.name] = init
    for module in MODULES:
        package, name = module.split(".")
        inside = found[package].parent
        folder, file = inside / name / "__init__.py", inside / f"{name}.py"
        found[module] = folder if folder.is_file() else file
    return found


def public_names(file: Path) -> list[str]:
    """The literal `__all__` of a file, sorted; modules and the version are left out."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            inside = {p.stem for p in file.parent.glob("*.py")} | {
                p.parent.name for p in file.parent.glob("*/__init__.py")
            }
            return sorted(n for n in ast.literal_eval(node.value) if n not in inside | {"__version__"})
    return []


def bound_names(file: Path) -> set[str]:
    """The names that a file binds where a reader of its text can see it (imports for type checkers count)."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def first_sentence(text: str) -> str:
    """The first sentence of a text's first paragraph, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", paragraph, maxsplit=1)[0]


def summary(file: Path) -> str:
    """The first sentence of a module's docstring."""
    return first_sentence(ast.get_docstring(ast.parse(file.read_text())) or "")


def api_pages() -> dict[str, str]:
    """Text of each page of the API reference by its path in the site."""
    pages, rows = {}, []
    for module, file in sources().items():
        names = sorted(public_names(file), key=_place)
        if not names:
            continue
        own = [name for name in names if name in bound_names(file)]
        body = [f"# {module}", summary(file), *(f"::: {module}.{name}" for name in own)]
        if passed_on := [f"`{name}`" for name in names if name not in own]:
            body.append("## Passed on from other packages\n\n" + ", ".join(passed_on))
        pages[f"reference/api/{module}.md"] = "\n\n".join(body) + "\n"
        rows.append(f"| [{module}]({module}.md) | {len(names)} | {summary(file)} |")
    head = "# Python API\n\nEvery public name, by module.\n\n| module | names | what it is |\n|---|---|---|\n"
    pages["reference/api/index.md"] = head + "\n".join(rows) + "\n"
    return pages


def _place(name: str) -> tuple[int, bool, str]:
    """Where a name stands on the page of its module: what is looked for first, then the rest, errors last."""
    return FIRST.index(name) if name in FIRST else len(FIRST), name.endswith("Error"), name.lower()


def package_pages() -> dict[str, str]:
    """README and changelog of every package, and a page that lists the packages."""
    pages, rows = {}, []
    for name, package in all_packages().items():
        readme = (package.path / "README.md").read_text()
        pages[f"packages/{name}.md"] = plain_links(readme)
        first = first_sentence(readme.partition("\n")[2])
        line = f"| [{name}]({name}.md) | {package.version} | {plain_links(first)} |"
        changes = package.path / "CHANGELOG.md"
        if changes.is_file():
            pages[f"packages/{name}-changes.md"] = plain_links(changes.read_text())
            line += f" [changes]({name}-changes.md) |"
        rows.append(line)
    head = (
        "# Packages\n\nEach package is installed, versioned and tested alone. Those of one checkout go together: "
        "`tools/dev.py alone all` tests each with the siblings of the same checkout.\n\n"
        "| package | version | what it is | changes |\n|---|---|---|---|\n"
    )
    pages["packages/index.md"] = head + "\n".join(rows) + "\n"
    return pages


def example_pages() -> dict[str, str]:
    """Every example program with its text, and the page that lists them."""
    listed = ROOT / "packages" / "dsx" / "examples" / "README.md"
    pages = {"examples/index.md": plain_links(listed.read_text())}
    for package in all_packages().values():
        for file in sorted((package.path / "examples").glob("*.py")):
            text = file.read_text()
            said = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
            place = file.relative_to(ROOT).as_posix()
            page = f"examples/{package.name}-{file.stem}.md"
            pages[page] = f"# {file.stem}\n\n{said}\n\n`{place}`\n\n```python\n{text.rstrip()}\n```\n"
            rows = {f"| `{place}`", f"| `{file.name}`" if listed.parent == file.parent else ""} - {""}
            for row in rows:
                linked = f"{row[:2]}[{row[2:]}]({Path(page).name})"
                pages["examples/index.md"] = pages["examples/index.md"].replace(row, linked)
    return pages


def decision_index() -> str:
    """A page that lists the decision records."""
    rows = []
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = file.read_text().splitlines()[0].lstrip("# ")
        rows.append(f"- [{title}]({file.name})")
    return "# Decisions\n\nWhat was decided, why, and what was left out.\n\n" + "\n".join(rows) + "\n"


def plain_links(text: str) -> str:
    """Links to files of the repository become their names, pictures are taken from the site: it needs no network."""

    def plain(found: re.Match[str]) -> str:
        label, target, _ = found.groups()
        return found.group(0) if re.match(r"[a-z]+:", target) else label

    return LINK.sub(plain, PICTURE.sub(lambda found: f"![{found[1]}](../assets/{Path(found[2]).name})", text))


def pictures() -> dict[str, Path]:
    """The pictures that READMEs show, by their path in the site."""
    texts = [(package.path / "README.md").read_text() for package in all_packages().values()]
    paths = [ROOT / found[1] for text in texts for found in PICTURE.findall(text)]
    return {f"assets/{path.name}": path for path in paths}


@event_priority(100)  # before mkdocstrings reads its configuration
def on_config(config: Any) -> Any:
    """Tell mkdocstrings where the packages' sources lie, and list the pages that are made here."""
    handler = config.plugins["mkdocstrings"].config.handlers["python"]
    handler["paths"] = [str(package.path / "src") for package in all_packages().values()]
    sections = {next(iter(entry)): entry for entry in config.nav}
    sections["Reference"]["Reference"].append({"Python API": sorted(api_pages(), key=_index_first)})
    sections["Examples"]["Examples"] = sorted(example_pages(), key=_index_first)
    pages = sorted(package_pages(), key=_index_first)
    changes = [page for page in pages if page.endswith("-changes.md")]
    sections["Packages"]["Packages"] = [*(p for p in pages if p not in changes), {"What has changed": changes}]
    decisions = sorted(f"decisions/{file.name}" for file in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    sections["Contributing"]["Contributing"].append({"Decisions": ["decisions/index.md", *decisions]})
    return config


def _index_first(path: str) -> tuple[bool, str]:
    return not path.endswith("index.md"), path


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    made = {**api_pages(), **package_pages(), **example_pages(), "decisions/index.md": decision_index()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for path, source in pictures().items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Say at the end of each page for which version it is, and take out links that leave the site.

    In what a search finds, guides come first, and pages for people who work on dsx last. On the page of codes the
    meaning stands in the heading too, so that the list of contents says it; the anchor stays the code.
    """
    if RARELY_SOUGHT.match(page.file.src_uri):
        page.meta.setdefault("search", {"boost": 0.1})
    elif OFTEN_SOUGHT.match(page.file.src_uri):
        page.meta.setdefault("search", {"boost": 3})
    if page.file.src_uri == "reference/errors.md":
        markdown = CODE.sub(_heading_with_meaning, markdown)
    inside = {file.src_uri for file in files}

    def keep(found: re.Match[str]) -> str:
        label, target, _ = found.groups()
        if re.match(r"[a-z]+:", target) or not target.startswith(".."):
            return found.group(0)
        from_here = Path(page.file.src_uri).parent
        resolved = Path("/", from_here, target).resolve().relative_to("/").as_posix()
        return found.group(0) if resolved in inside else label

    version = all_packages()["dsx"].version
    return LINK.sub(keep, markdown) + f"\n\n---\n\n<small>This page is for dsx {version}.</small>\n"


def _heading_with_meaning(found: re.Match[str]) -> str:
    code, meaning, error = found.groups()
    raised = f"\n\n{error}" if error else ""
    return f"### {code}: {meaning} {{ #{code.lower()} }}{raised}"
