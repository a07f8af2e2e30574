"""Codes, nearest names, strict JSON, and an import that is free of effects."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import pytest
from dsx_core import CodedError, RanksDifferError, nearest, shorten, strict_json, with_code


def test_the_code_stands_once_at_the_end() -> None:
    class Lost(CodedError):
        code = "DSX206"

    assert str(Lost("rank 1 is gone")) == "rank 1 is gone [DSX206] docs: dsx explain DSX206"
    assert str(Lost(str(Lost("rank 1 is gone")))) == "rank 1 is gone [DSX206] docs: dsx explain DSX206"
    assert str(CodedError("plain")) == "plain"
    assert str(CodedError("plain", code="DSX901")) == with_code("plain", "DSX901")


def test_errors_survive_pickling_with_their_text() -> None:
    error = pickle.loads(pickle.dumps(RanksDifferError("ranks differ")))
    assert str(error) == str(RanksDifferError("ranks differ"))


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("lerning_rate", ["learning_rate", "momentum"], ["learning_rate"]),
        ("STAGE", ["stage", "stages"], ["stage"]),
        (
            "prefetch_bucket_size",
            ["stage3_prefetch_bucket_size", "overlap_comm"],
            ["stage3_prefetch_bucket_size"],
        ),
        ("bata", ["beta", "data"], ["beta", "data"]),
        ("H100", ["A10", "H100-PCIE", "H100-SXM"], ["H100-PCIE", "H100-SXM"]),
        ("stages", ["stage", "stages.first"], ["stage"]),
        ("zzz", ["alpha"], []),
        ("x" * 200, ["x"], []),
    ],
)
def test_nearest_names(name: str, known: list[str], expected: list[str]) -> None:
    assert nearest(name, known) == expected


def test_long_texts_are_cut_with_their_length() -> None:
    assert shorten("short") == "short"
    assert shorten("x" * 500, 60) == "x" * 40 + "... (500 characters)"


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[NaN]", "[Infinity]", "[" * 100_000 + "]" * 100_000])
def test_json_that_python_accepts_or_dies_of_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json.parse(text)


def test_infinities_of_python_are_taken_where_they_are_asked_for() -> None:
    assert strict_json.parse('{"a": [Infinity, -Infinity, 1]}', nan=True) == {"a": [math.inf, -math.inf, 1]}
    assert math.isnan(strict_json.parse("NaN", nan=True))
    with pytest.raises(ValueError, match="two values"):
        strict_json.parse('{"a": NaN, "a": 1}', nan=True)


@pytest.mark.parametrize(
    "value", [True, 4.0, -1, 1 << 63, "4", None, math.inf, 1 << 70_000, [4]], ids=lambda value: type(value).__name__
)
def test_a_size_is_a_whole_number(value: object) -> None:
    with pytest.raises(ValueError, match=r"tensors\.x: expected a whole number"):
        strict_json.size(value, "tensors.x")


def test_a_hostile_value_is_never_written_out() -> None:
    shared: list[object] = [0]
    for _ in range(60):  # its text would have 2**60 elements
        shared = [shared, shared]
    with pytest.raises(ValueError, match="got list"):
        strict_json.size(shared, "x")
    assert strict_json.shape([2, 3], "x") == (2, 3)


def test_the_import_loads_no_torch() -> None:
    program = "import sys, dsx_core; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
