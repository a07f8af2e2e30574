"""A configuration is a dictionary, a file written by a person, or base64 text; each is read the same way."""

from __future__ import annotations

import base64
import json
import types

import pytest
from dsx.config import DsxConfigError, load_config
from dsx.config.jsonc import JsonTextError, parse

VALUES = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}}

COMMENTED = """\
// batch
{
  "train_micro_batch_size_per_gpu": 2,  # per rank
  /* "gradient_clipping": 0.5, */
  "zero_optimization": {
    "stage": 1,
    "reduce_bucket_size": 5e8, // a "quoted" word, and // more
  },
}
"""


def test_every_source_gives_the_same_configuration(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_text(COMMENTED)
    encoded = base64.b64encode(json.dumps(VALUES).encode()).decode()
    sources = [VALUES, types.MappingProxyType(VALUES), file, str(file), encoded, encoded.rstrip("=")]
    loaded = [load_config(source, world_size=1) for source in sources]
    assert all(config.root == loaded[0].root for config in loaded)
    assert loaded[0].zero_optimization.reduce_bucket_size == 500_000_000
    assert loaded[0].gradient_clipping == 1.0
    assert loaded[2].source == str(file)


def test_url_safe_base64_is_read():
    values = {**VALUES, "csv_monitor": {"job_name": "???>>>~~~"}}
    encoded = base64.urlsafe_b64encode(json.dumps(values).encode()).decode()
    assert "_" in encoded or "-" in encoded
    assert load_config(encoded, world_size=1).csv_monitor.job_name == "???>>>~~~"


def test_the_callers_dictionary_is_left_alone():
    values = {"bfloat16": {"enabled": "auto"}, "train_batch_size": 4, "zero_optimization": True}
    before = json.dumps(values)
    config = load_config(values, world_size=1)
    assert json.dumps(values) == before
    values["train_batch_size"] = 8
    assert config.batch.train == 4


BROKEN = {
    "a comma is missing": ('{\n  "a": 1\n  "b": 2\n}', 3, 3, "comma"),
    "a brace is missing": ('{\n  "a": {"b": 1}\n', 3, 1, 'of line 1 is never closed'),
    "a bracket is missing": ('{"a": [1, 2', 1, 12, "never closed"),
    "no colon": ('{"a" 1}', 1, 6, '":"'),
    "text without quotes": ("{a: b}", 1, 5, "not a JSON value"),
    "single quotes": ("{\"a\": 'b'}", 1, 7, "single quotes"),
    "Python's True": ('{"a": True}', 1, 7, "True is Python"),
    "Python's None": ('{"a":\n None}', 2, 2, "None is Python"),
    "two commas": ('{"a": 1,, "b": 2}', 1, 9, "nothing before it"),
    "text after the end": ('{"a": 1}\n}', 2, 1, "after the end"),
    "an open comment": ('{"a": 1} /* ...', 1, 10, "comment"),
    "an open text": ('{"a": "b}', 1, 7, "Unterminated"),
    "a number that is none": ('{"a": 1.}', 1, 7, "number"),
    "a number with a leading zero": ('{"a": 012}', 1, 7, "number"),
    "not a number": ('{"a": NaN}', 1, 7, "NaN"),
    "infinity": ('{"a": 1e999}', 1, 7, "too large"),
    "infinity by its name": ('{"a": 1, "steps_per_print": Infinity}', 1, 29, "Infinity is not a JSON number"),
    "minus infinity": ('{"a": -Infinity}', 1, 7, "-Infinity is not a JSON number"),
    "a missing value": ('{"a": }', 1, 7, "not a JSON value"),
    "nothing": ("  \n", 2, 1, "empty"),
    "too deep": ('{"a":' * 80, 1, 65 * 5 + 1, "nested deeper"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_text_is_shown_with_line_column_and_caret(name, tmp_path):
    text, line, column, words = BROKEN[name]
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(DsxConfigError) as caught:
        load_config(file, world_size=1)
    (problem,) = caught.value.problems
    assert problem.where == f"line {line}, column {column}"
    assert words in problem.message
    *_, shown, caret = problem.excerpt.split("\n")
    assert shown.lstrip().startswith(f"{line} |")
    written = (text.splitlines() or [""])[line - 1] if line <= len(text.splitlines()) else ""
    text = shown.split("| ", 1)[1]
    at = caret.index("^") - caret.index("| ") - 2
    assert text == written if len(written) <= 100 else text in written
    assert text[at:] == written[column - 1 :][: len(text) - at]


def test_who_writes_infinity_for_never_is_told_to_write_null(tmp_path):
    file = tmp_path / "never.json"
    file.write_text('{"train_batch_size": 1, "steps_per_print": Infinity}')
    with pytest.raises(DsxConfigError) as caught:
        load_config(file, world_size=1)
    assert caught.value.problems[0].expected == "a finite number; null where it means never"
    with pytest.raises(DsxConfigError) as caught:
        load_config({"train_batch_size": 1, "steps_per_print": float("inf")}, world_size=1)
    (problem,) = caught.value.problems
    assert (problem.path, problem.fix) == ("steps_per_print", "write null (None): no progress lines")
    file.write_text(file.read_text().replace("Infinity", "null"))
    assert not load_config(file, world_size=1).steps_per_print


def test_a_key_given_twice_is_refused_with_both_places(tmp_path):
    file = tmp_path / "twice.json"
    file.write_text('{"fp16": {\n"enabled": true,\n"enabled": false}}')
    with pytest.raises(DsxConfigError) as caught:
        load_config(file, world_size=1)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.path, problem.where) == ("duplicate-key", "fp16.enabled", "line 3, column 1")
    assert "first is in line 2" in problem.expected


def test_the_reader_agrees_with_pythons_on_plain_json():
    value = {"a": [1, -2.5e-3, '\u00e9\n"', None, True, {}], "b": {"c": [[]], "": 0}, "\u4e2d": 10**20}
    for indent in (None, 2):
        for ascii_only in (True, False):
            text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
            assert parse(text).value == value
    assert isinstance(parse('{"a": 5e8}').value["a"], float)


@pytest.mark.parametrize("text", ['{"a": 1,}', "[1, 2,]", "\ufeff{}", '{"a": "// not a comment"}', "# c\n{} // end"])
def test_liberties(text):
    assert parse(text).value is not None


@pytest.mark.parametrize("text", ["{,}", "[,]", "[1,,]", "{} {}", '{"a": 0x10}', '{"a" = 1}', '{"a": .5}', '{"a": +1}'])
def test_no_further_liberties(text):
    with pytest.raises(JsonTextError):
        parse(text)


@pytest.mark.parametrize("source", ["missing/dsx.json", "e30", "", '{"train_batch_size": 1}'])
def test_a_missing_file_is_named(source):
    with pytest.raises(DsxConfigError) as caught:
        load_config(source, world_size=1)
    kinds = {problem.kind for problem in caught.value.problems}
    # "e30" is base64 of an empty object: read, and found to lack a batch size.
    assert kinds == ({"missing"} if source == "e30" else {"source"})


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(DsxConfigError, match="folder"):
        load_config(tmp_path, world_size=1)


def test_a_file_that_is_not_text(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(DsxConfigError, match="not UTF-8"):
        load_config(file, world_size=1)


@pytest.mark.parametrize("source", [None, 3, [1], b"{}"])
def test_other_objects_are_refused(source):
    with pytest.raises(DsxConfigError, match="this is not a configuration"):
        load_config(source, world_size=1)


def test_a_document_that_is_not_an_object(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_text("[1, 2]")
    with pytest.raises(DsxConfigError, match="not an object"):
        load_config(file, world_size=1)


def test_keys_that_are_not_text():
    with pytest.raises(DsxConfigError, match="a key is not text"):
        load_config({1: 2}, world_size=1)
