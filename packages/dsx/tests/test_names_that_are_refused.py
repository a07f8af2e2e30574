"""Names of DeepSpeed that dsx will not have say what to use instead."""

import dsx
import pytest


@pytest.mark.parametrize(
    ("name", "instead"),
    [("linear", "peft"), ("init_inference", "inference engine")],
)
def test_the_error_names_the_way(name, instead):
    owner = dsx
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    with pytest.raises(AttributeError, match=instead):
        getattr(owner, last)
