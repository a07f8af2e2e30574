"""The README's examples run as they stand, and its table of methods names every key."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dsx_compress.config import METHODS, CompressionTraining

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.S | re.M)
EXAMPLES = [code for language, code in BLOCKS if language == "python"]


@pytest.mark.parametrize("place", range(3))
def test_the_examples_run(place, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[place]], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_there_are_no_other_examples():
    assert len(EXAMPLES) == 3 and {language for language, _ in BLOCKS} <= {"python", "sh"}


def test_the_table_names_every_key():
    rows = {line.split("`")[1]: line for line in README.read_text().splitlines() if line.startswith("| `")}
    everywhere = {"enabled", "schedule_offset", "quantizer_kernel", "quantize_weight_in_forward"}
    for method in METHODS:
        section = CompressionTraining.model_fields[method].annotation
        shared = section.model_fields["shared_parameters"].annotation
        group = section.model_fields["different_groups"].annotation.__args__[1].model_fields["params"].annotation
        missing = [
            key for key in {*shared.model_fields, *group.model_fields} - everywhere if f"`{key}`" not in rows[method]
        ]
        assert not missing, (method, missing)


def test_importing_is_silent_and_loads_neither_torch_nor_pydantic():
    code = "import dsx_compress, sys; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
