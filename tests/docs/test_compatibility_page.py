"""The page on compatibility is made from the file of results; a cell is green only where that has a run that passed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import compatibility  # noqa: E402

KNOWN = json.loads(compatibility.RESULTS.read_text())


def cells(page: str) -> dict[tuple[str, str, str], str]:
    """{(client, feature, stage): mark} of the tables of a page."""
    found = {}
    for section in page.split("\n## ")[1:]:
        client = section.partition("\n")[0]
        for row in re.findall(r"^\| (.+?) \| (.+) \| (.+) \| (.+) \| (.+) \|$", section, re.M)[1:]:
            if not row[0].startswith("---"):
                found |= {(client, row[0], stage): mark for stage, mark in zip("0123", row[1:])}
    return found


def test_the_page_and_the_file_agree():
    assert compatibility.PAGE.read_text() == compatibility.page(KNOWN), "run python tools/compatibility.py"
    command = [sys.executable, str(ROOT / "tools" / "compatibility.py"), "--check"]
    assert subprocess.run(command).returncode == 0


def test_green_means_a_run_that_passed():
    shown = cells(compatibility.PAGE.read_text())
    assert len(shown) >= 4 * 12
    for (client, feature, stage), mark in shown.items():
        outcome = KNOWN["results"].get(client, {}).get(feature, {}).get(stage)
        assert (mark == "✅") == (outcome == "passed"), (client, feature, stage)
        assert (mark == "not run") == (outcome is None), (client, feature, stage)


def test_every_test_of_a_client_is_in_the_table():
    source = ROOT / "packages" / "dsx-compat" / "tests_clients" / "test_clients.py"
    named = set(compatibility.TESTS) | compatibility.CHECKS_OF_THE_CHECK
    assert compatibility.tests_of_clients(source.read_text()) == named
    assert {client for client, _, _ in compatibility.TESTS.values()} == set(compatibility.NOT_RUN)


def test_versions_are_those_that_the_clients_are_pinned_to():
    pinned = (ROOT / "packages" / "dsx-compat" / "tests_clients" / "requirements.txt").read_text()
    for name, version in re.findall(r"^(\w+)==(\S+)$", pinned, re.M):
        assert version in KNOWN["versions"][name].split(" and "), f"{name}: run python3 tools/dev.py clients"


def report(folder: Path, versions: str = "{}", **outcomes: str) -> Path:
    """A report of pytest: every known test passed, but those in `outcomes`."""
    rows = []
    for name in [*compatibility.TESTS, *compatibility.CHECKS_OF_THE_CHECK]:
        words = {"test_trl_and_peft": "[dpo-lora-3]", "test_lightning_trains_and_resumes": "[fabric-2]"}.get(
            name, "[2]"
        )
        inside = outcomes.get(name, "")
        if inside != "absent":
            rows.append(f'<testcase classname="x.test_clients" name="{name}{words}">{inside}</testcase>')
    path = folder / "report.xml"
    properties = f'<properties><property name="versions" value="{escape(versions, {chr(34): "&quot;"})}"/></properties>'
    path.write_text(f"<testsuites><testsuite>{properties}{''.join(rows)}</testsuite></testsuites>")
    return path


def test_a_client_in_two_environments_has_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path / "c.json")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "c.md")
    skipped = '<skipped message="needs it"/>'
    (tmp_path / "older").mkdir()
    compatibility.record(
        report(tmp_path, '{"trl": "1.2", "torch": "2"}', test_trl_and_peft=skipped),
        report(tmp_path / "older", '{"trl": "0.9", "torch": "2"}'),
    )
    page = (tmp_path / "c.md").read_text()
    assert "trl 1.2 and 0.9, torch 2. On CPU" in page and cells(page)["trl and peft", "DPO, LoRA", "3"] == "✅"


def test_a_failure_is_red_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path / "c.json")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "c.md")
    compatibility.record(report(tmp_path, test_accelerate_accumulates='<failure message="x&#10;loss 3, expected 2"/>'))
    page = (tmp_path / "c.md").read_text()
    shown = cells(page)
    assert shown["Accelerate", "gradient accumulation", "2"] == "❌"
    assert "- Accelerate, gradient accumulation, stage 2: failure: loss 3, expected 2" in page
    assert shown["trl and peft", "DPO, LoRA", "3"] == "✅" and shown["trl and peft", "DPO, LoRA", "2"] == "not run"
    assert shown["Lightning", "Fabric: train, save, resume", "2"] == "✅"
    compatibility.record(
        report(tmp_path, test_accelerate_accumulates='<failure message="Failed: Timeout (&gt;300s)"/>')
    )
    assert cells((tmp_path / "c.md").read_text())["Accelerate", "gradient accumulation", "2"] == "timed out"
    compatibility.record(report(tmp_path, test_accelerate_accumulates='<skipped message="needs accelerate"/>'))
    assert "skipped: needs accelerate" in (tmp_path / "c.md").read_text(), "skipped is not green"


def test_what_a_run_did_not_come_to_is_not_green(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path / "c.json")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "c.md")
    compatibility.record(report(tmp_path, test_accelerate_accumulates="absent"))
    page = (tmp_path / "c.md").read_text()
    assert {cells(page)["Accelerate", "gradient accumulation", stage] for stage in "0123"} == {"not run"}
    assert "This run did not come to: gradient accumulation." in page
    (tmp_path / "report.xml").write_text("<testsuites/>")
    with pytest.raises(ValueError, match="no test of the table ran"):
        compatibility.record(tmp_path / "report.xml")
