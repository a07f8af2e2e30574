"""`import dsx as deepspeed`: the names of DeepSpeed that live in dsx-compat are found from dsx, as the same objects."""

import importlib
import subprocess
import sys

import pytest
from dsx.deepspeed_names import PLACES

NAMES = [
    (module, name, place) for module, names in PLACES.items() for name, place in names.items() if module != "dsx.Engine"
]


@pytest.mark.parametrize(("module", "name", "place"), NAMES)
def test_a_name_of_the_table_is_the_object_of_dsx_compat(module, name, place):
    where, _, attribute = place.partition(":")
    expected = importlib.import_module(where)
    found = getattr(importlib.import_module(module), name)
    assert found is (getattr(expected, attribute) if attribute else expected)


def test_a_program_with_dsx_in_place_of_deepspeed():
    code = (
        "import dsx as deepspeed\n"
        "from dsx.accelerator import get_accelerator\n"
        "assert deepspeed.accelerator.get_accelerator() is get_accelerator() is deepspeed.get_accelerator()\n"
        "import dsx.accelerator, dsx_compat.accelerator\n"
        "assert dsx.accelerator is dsx_compat.accelerator\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
