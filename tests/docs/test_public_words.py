"""Texts that a reader meets: no numbers of lists that only developers have, and docstrings that say something."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "site"))
import hooks  # noqa: E402


def test_sources_and_pages_name_no_private_number():
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")]
    assert len(files) > 500
    number = re.compile(
        r"(?<=[a-z`.)] )\(F\d{1,3}[^()A-Z_=*]*\)|\b(?:names|options|formulas) of F\d+|\bcontract C\d+\b"
    )
    found = {file.relative_to(ROOT).as_posix(): number.findall(file.read_text()) for file in files}
    assert {name: numbers for name, numbers in found.items() if numbers} == {}


def test_no_docstring_only_refers_to_its_module():
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("packages/*/bench/*.py")]
    assert len(files) > 500
    assert [file.name for file in files if re.search(r'"""See the module', file.read_text())] == []


@pytest.mark.parametrize("module", [name for name, file in hooks.sources().items() if hooks.public_names(file)])
def test_docstrings_of_public_names_stand_alone(module):
    """The page of a class does not show the text of the module that it is in."""
    found = importlib.import_module(module)
    texts = {name: getattr(getattr(found, name), "__doc__", None) or "" for name in found.__all__}
    assert [name for name, text in texts.items() if "See the module's text" in text] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One line\nand the rest. More of it.", "One line and the rest."),
        ("About torch.nn and 0.1.0. Then more.", "About torch.nn and 0.1.0."),
        ("\n\nA paragraph\n\nAnother. One.", "A paragraph"),
        ("Is it? `yes` it is.", "Is it?"),
    ],
)
def test_first_sentences_are_whole(text, sentence):
    assert hooks.first_sentence(text) == sentence
