"""The README's examples run as they stand."""

import re
from pathlib import Path

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_the_first_example_names_its_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(EXAMPLES[0], "README.md", "exec"), scope)
    fault = scope["receipt"].fault
    assert (fault.kind, fault.name, fault.step) == ("scaled by accumulation", "0.weight", 1)
    assert any("times 2" in line for line in fault.evidence)
    assert "scaled by accumulation" in (tmp_path / "receipt.html").read_text()


def test_the_second_example_watches():
    assert len(EXAMPLES) == 2
    scope = {}
    exec(compile(EXAMPLES[1], "README.md", "exec"), scope)
    assert scope["watching"].hang is None
