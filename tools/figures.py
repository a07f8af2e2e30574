"""Puts the tables of docs/figures/*.json, which benches write, into the pages that show them.

    python3 tools/dev.py figures                               fill in
    python3 tools/dev.py figures --check                       say what would change; exit code 1 if anything would
    python3 tools/dev.py figures --take NAME SCRIPT [...]      run an example, keep the last table that it prints

A page has two marks, and what stands between them is made here:

    <!-- figures: step_time -->
    <!-- end of figures -->

The idea: a bench run with `--json docs/figures/NAME.json` and this command are all that it takes to renew a table.
Examples stay free of that option, because they are there to be copied: `--take` reads what they print. Left out: the
words around the tables. Whoever renews figures reads whether they still say the truth.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from dsx_testkit.results import FiguresError, Record, Table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "figures"
MARKS = re.compile(r"^<!-- figures: (\S+) -->\n(.*?)^<!-- end of figures -->", re.S | re.M)
PRINTED = re.compile(r"((?:^ *\|.*\|[ \t]*\n)+)", re.M)


def pages() -> list[Path]:
    """The files that may show figures."""
    return [ROOT / "docs" / "figures.md", *sorted(FOLDER.glob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))]


def filled(text: str, folder: Path | None = None) -> str:
    """The text of a page with every table made again. Raises FiguresError where a mark names no usable file."""

    def table(found: re.Match[str]) -> str:
        record = Record.load((folder or FOLDER) / f"{found[1]}.json")
        return f"<!-- figures: {found[1]} -->\n\n{record.table()}\n\n{record.caption()}\n\n<!-- end of figures -->"

    if len(re.findall(r"^<!-- figures:", text, re.M)) != len(MARKS.findall(text)):
        raise FiguresError("a mark `<!-- figures: NAME -->` has no `<!-- end of figures -->` of its own after it")
    return MARKS.sub(table, text)


def unused() -> list[str]:
    """Names of files that no page shows."""
    shown = {name for page in pages() for name, _ in MARKS.findall(page.read_text(encoding="utf-8"))}
    return sorted({file.stem for file in FOLDER.glob("*.json")} - shown)


def taken(output: str, words: list[str]) -> Record:
    """The last Markdown table in what a program has printed. Raises FiguresError where there is none, or where two of
    its columns have the same title.
    """
    found = PRINTED.findall(output + "\n")
    lines = (
        [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in found[-1].splitlines()] if found else []
    )
    if len(lines) < 3 or not all(re.fullmatch(r":?-+:?", cell) for cell in lines[1]):
        raise FiguresError(f"{words[0]} has printed no Markdown table with rows")
    head, _, *rows = lines
    if len(set(head)) != len(head) or any(len(row) != len(head) for row in rows):
        raise FiguresError(f"{words[0]}: columns need titles of their own and rows as many cells; got {head}")
    table = Table(dict.fromkeys(head, ""))
    table.rows = [{name: cell for name, cell in zip(head, row) if cell} for row in rows]
    return table.record(words)


def take(name: str, words: list[str]) -> None:
    """Run a Python script, show what it prints, and keep its last table as docs/figures/NAME.json."""
    output = []
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            output.append(line)
            print(line, end="", flush=True)
    if process.returncode != 0:
        raise FiguresError(f"{words[0]} ended with exit code {process.returncode}; no figures were kept")
    (FOLDER / f"{name}.json").write_text(taken("".join(output), words).dump(), encoding="utf-8")


def fill(check: bool) -> int:
    """Fill in every page, or only say which would change; the exit code."""
    changed = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            made = filled(text)
        except FiguresError as error:
            raise FiguresError(f"{page.relative_to(ROOT)}: {error}") from error
        if made != text:
            changed.append(page)
            print(f"{'not up to date' if check else 'filled in'}: {page.relative_to(ROOT)}")
            if not check:
                page.write_text(made, encoding="utf-8")
    for name in unused():
        print(f"no page shows docs/figures/{name}.json", file=sys.stderr)
    return 1 if (check and changed) or unused() else 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is not up to date")
    parser.add_argument("--take", metavar="NAME", help="run the script that follows, keep its last table as NAME")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="of --take, with its arguments")
    options = parser.parse_args()
    if bool(options.take) != bool(options.script):
        parser.error("--take NAME needs a script after it, and a script needs --take NAME before it")
    try:
        if options.take:
            take(options.take, options.script)
        return fill(options.check)
    except FiguresError as error:
        print(f"[figures] {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
