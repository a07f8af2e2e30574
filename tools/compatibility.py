"""The page on compatibility: which clients were run with which ZeRO stages and features, from a file of results.

`python tools/compatibility.py record REPORT.xml` reads pytest's report of a whole run of tests_clients into
docs/reference/compatibility.json, with the versions that the report has; `tools/dev.py clients` calls it.
Without an argument the page is made from that file; `--check` changes nothing and fails where page and file differ.

A cell is green only if a run of the file passed. What no test runs is said to be so, with the reason. Tests that look
whether a mistake is noticed are no rows. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "reference" / "compatibility.json"
PAGE = RESULTS.with_suffix(".md")
STAGES = "0123"

# Test: client, feature, and the stage where it is no parameter of the test.
TESTS = {
    "test_accelerate_trains_saves_and_resumes": ("Accelerate", "train, save, resume", None),
    "test_accelerate_accumulates": ("Accelerate", "gradient accumulation", None),
    "test_accelerate_offloads_to_the_host": ("Accelerate", "offload to the host", None),
    "test_accelerate_takes_optimizer_and_schedule_from_a_file": (
        "Accelerate", "optimizer and schedule from a configuration file", "2"),
    "test_accelerate_launch_starts_it": ("Accelerate", "`accelerate launch`", "2"),
    "test_trainer_with_auto_values_and_a_resume": (
        "transformers Trainer", 'values "auto" in the configuration, resume', None),
    "test_trainer_from_pretrained_with_a_larger_vocabulary": (
        "transformers Trainer", "`from_pretrained`, vocabulary resized", "3"),
    "test_trl_and_peft": ("trl and peft", "{}", None),
    "test_trl_generates_with_its_own_loop": ("trl and peft", "GRPO, generation in the loop", None),
    "test_openrlhf_scores_trains_sleeps_and_pushes": (
        "OpenRLHF", "actor and reference: PPO's loss, sleep, push, saved model", None),
    "test_verl_steps_pushes_and_resumes": ("verl", "{}: steps, push, checkpoint, resume", None),
    "test_llamafactory_trains_by_its_own_call": ("LLaMA-Factory", "{}", None),
    "test_lightning_trains_and_resumes": ("Lightning", "{}: train, save, resume", None),
}  # fmt: skip
CHECKS_OF_THE_CHECK = {
    "test_accelerate_notices_a_resume_that_loads_nothing",
    "test_trainer_notices_a_resume_that_loads_nothing",
    "test_a_curve_of_trl_shows_an_update_that_was_left_out",
    "test_a_curve_of_openrlhf_shows_an_update_that_was_left_out",
    "test_a_curve_of_verl_shows_an_update_that_was_left_out",
    "test_a_curve_of_llamafactory_shows_an_update_that_was_left_out",
}
VARIANTS = {
    "sft-lora": "supervised fine-tuning, LoRA", "sft-adalora": "supervised fine-tuning, AdaLoRA",
    "dpo-reference": "DPO with a reference model", "dpo-lora": "DPO, LoRA", "trainer": "Trainer", "fabric": "Fabric",
    "actor": "actor", "actor-asleep": "actor, states in host memory between phases", "lora": "actor with LoRA",
    "critic": "critic", "actor-ulysses": "actor, each sequence over two ranks",
}  # fmt: skip
NOT_RUN = {
    "Accelerate": "training has one at every stage; other features have one at a low and a high stage, or at one",
    "transformers Trainer": "stages 0 and 1 have none; the Trainer's loop is Accelerate's, which has",
    "trl and peft": "stages 0 and 1 have none; the loop is the Trainer's",
    "OpenRLHF": "its users train at stages 2 and 3; its trainer wants vLLM and Ray actors on GPUs",
    "verl": "stages 0 and 1 have none; its engine's code is run, not its trainer, which wants vLLM and Ray on GPUs",
    "LLaMA-Factory": "stages 0 and 1 have none; the loop is the Trainer's",
    "Lightning": "stages 0 and 1 have none",
}
MARKS = {"not run": "not run", "passed": "✅", "timed out": "timed out"}
NEVER_RUN = (
    ("any client on a GPU, bf16 or fp16 kernels", "no part of dsx has run on a GPU yet"),
    ("8-bit optimizers of bitsandbytes", "they need a GPU; `Adam8bit` of dsx-ops has the same states"),
    ("vLLM generation in trl", "it needs a GPU; generation by the model itself is run"),
    ("offload to disk through a client", "the engine's own tests run it; no client's program does yet"),
    ("Ulysses and chunked attention under DeepSpeed's names", "`sequence_parallel_size` of the engine is the way"),
)


def record(*reports: Path) -> None:
    """Write the results of a run, and the page. What stands in a later report counts: failed tests were run again.

    Raises:
        ValueError: the report has a test that the table does not know, or none that it does.
    """
    results: dict[str, dict[str, dict[str, str]]] = {}
    seen = set()
    trees = [ElementTree.parse(report) for report in reports]
    for case in (case for tree in trees for case in tree.iter("testcase")):
        if not (case.get("classname") or "").endswith("test_clients"):
            continue  # pytest's own, where a run was ended early
        name, _, words = case.get("name", "").partition("[")
        seen.add(name)
        if name in CHECKS_OF_THE_CHECK:
            continue
        if name not in TESTS:
            raise ValueError(f"{name} is not in the table of tools/compatibility.py; add what it shows")
        client, feature, stage = TESTS[name]
        parts = words.rstrip("]").split("-")
        stage = stage or next(part for part in parts if part in STAGES)
        variant = "-".join(part for part in parts if part not in STAGES)
        feature = feature.format(VARIANTS.get(variant, variant))
        results.setdefault(client, {}).setdefault(feature, {})[stage] = _outcome(case)
    if not results:
        raise ValueError(f"{reports}: no test of the table ran")
    for name, (client, feature, _) in TESTS.items():  # a run that was ended early: its rows stay, and are not green
        if name not in seen:
            results.setdefault(client, {}).setdefault(feature.format("all of it"), {})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    content = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit.stdout.strip() or "not known",
        "versions": {"Python": platform.python_version(), **_versions(trees)},
        "results": results,
    }
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
    PAGE.write_text(page(content))


def _versions(trees: list[Any]) -> dict[str, str]:
    """The clients' versions as the reports give them; of a client in two environments both."""
    found: dict[str, list[str]] = {}
    for tree in trees:
        for one in tree.iter("property"):
            for name, version in json.loads(one.get("value", "{}") if one.get("name") == "versions" else "{}").items():
                found.setdefault(name, []).append(version)
    return {name: " and ".join(dict.fromkeys(versions)) for name, versions in found.items()}


def _outcome(case: ElementTree.Element) -> str:
    """passed, or what happened instead. A limit of time that was reached says nothing of the client: no failure."""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            said = (found.get("message") or "").strip().splitlines()
            if said and re.search(r"\bTimeout", said[-1]):
                return "timed out: the machine was too busy for the test's limit"
            return f"{kind}: {said[-1][:160] if said else 'no message'}"
    return "passed"


def page(content: dict[str, Any]) -> str:
    """The page of some results."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        "# Compatibility", "",
        "Programs of other projects, unchanged, through the `deepspeed` module of",
        "[dsx-compat](../packages/dsx-compat.md).",
        "Each runs on two processes, and its losses must be those of plain PyTorch, or of the same program without an",
        "engine. `python3 tools/dev.py clients` runs them all and writes this page.", "",
        f"Run on {content['date']} at commit {content['commit']}: {versions}. On CPU.", "",
    ]  # fmt: skip
    reasons: list[str] = []
    for client, features in content["results"].items():
        lines += [
            f"## {client}",
            "",
            f"| what | {' | '.join(f'stage {stage}' for stage in STAGES)} |",
            "|---|---|---|---|---|",
        ]
        for feature, cells in features.items():
            shown = []
            for stage in STAGES:
                outcome = cells.get(stage)
                if outcome not in (None, "passed"):
                    reasons.append(f"- {client}, {feature}, stage {stage}: {outcome}")
                shown.append(MARKS.get((outcome or "not run").partition(":")[0], "❌"))
            lines.append(f"| {feature} | {' | '.join(shown)} |")
        lines += ["", f"No test: {NOT_RUN[client]}.", ""]
        if late := [feature for feature, cells in features.items() if not cells]:
            lines += [f"This run did not come to: {', '.join(late)}.", ""]
    lines += ["## What did not pass", "", *(reasons or ["Nothing: all that ran passed."]), ""]
    lines += ["## What nobody has run", "", "| what | why not |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in NEVER_RUN]
    lines += ["", "Names that dsx-compat does not have raise an error that says what to use instead:"
              " [what is not supported](../packages/dsx-compat.md#what-is-not-supported).", ""]  # fmt: skip
    return "\n".join(lines)


def tests_of_clients(source: str) -> set[str]:
    """The names of the tests in a file's text."""
    return set(re.findall(r"^def (test_\w+)", source, re.M))


def main() -> int:
    """Record, write or check; returns 1 if the page is not up to date."""
    parser = argparse.ArgumentParser(description="The page on compatibility, from the results of tools/dev.py clients.")
    parser.add_argument(
        "record",
        nargs="*",
        metavar="record REPORT.xml",
        help="record a run's results first (further reports: tests that were run again)",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is out of date")
    options = parser.parse_args()
    if options.record:
        if len(options.record) < 2 or options.record[0] != "record":
            parser.error(f"got {' '.join(options.record)!r}, expected: record REPORT.xml ...")
        record(*map(Path, options.record[1:]))
        return 0
    text = page(json.loads(RESULTS.read_text()))
    if not options.check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print("docs/reference/compatibility.md: out of date; run python tools/compatibility.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
