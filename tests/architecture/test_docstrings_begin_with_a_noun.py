"""Docstrings begin with a noun phrase or a verb, not with a question word that stands for a noun.

"The ranks that are missing" says what a function returns; "Which ranks are missing" makes the reader guess whether the
function returns, decides or explains it. "Whether" stays: it is the usual beginning for a function that returns a bool.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages  # noqa: E402

QUESTION = re.compile(r"(What|How|Where|Which|Who|Whose|Why)\b")
PACKAGES = all_packages()


def _question_docstrings(source: str) -> list[tuple[int, str]]:
    """Line and first line of each docstring, of attributes too, that begins with a question word."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    texts = [(node.lineno, node.value.value) for node in statements if isinstance(node.value, ast.Constant)]
    return sorted((line, t.splitlines()[0]) for line, t in texts if isinstance(t, str) and QUESTION.match(t))


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_no_docstring_begins_with_a_question_word(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((package.path / "src").rglob("*.py"))
        for line, text in _question_docstrings(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_scan_sees_modules_classes_functions_and_attributes():
    source = '"""What it is."""\nclass A:\n    """Whether it works."""\n    def f(self):\n        """Why it fails."""\n'
    assert _question_docstrings(f'{source}B = 1\n"""How many."""\n...\n') == [
        (1, "What it is."),
        (5, "Why it fails."),
        (7, "How many."),
    ]
