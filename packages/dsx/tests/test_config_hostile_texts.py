"""Texts that no person writes end in a short error, soon."""

import json

import pytest
from dsx.config import DsxConfigError, load_config


def error_of(tmp_path, text):
    file = tmp_path / "dsx.json"
    file.write_text(text)
    with pytest.raises(DsxConfigError) as caught:
        load_config(file, world_size=1)
    return str(caught.value)


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": ' + "1" * 10_000 + "}", "this number has 10000 digits"),
        (json.dumps({"train_batch_size": 1, LONG: 2}), "(1000000 characters)"),
        (json.dumps({"train_batch_size": 1, "fp16": {LONG: 2}}), "characters)"),
        ('{"train_batch_size": 1, ' + f'"{LONG}": 1, "{LONG}": 2' + "}", "is given twice"),
        ('{"train_batch_size": ' + LONG + "}", "is not a JSON value"),
        (json.dumps({"train_batch_size": LONG}), "wrong type"),
        (json.dumps({"train_batch_size": 1, **{f"k{i}": i for i in range(100_000)}}), "99900 more problems"),
        ('{"a": "' + LONG + '" "b": 1}', "a comma is missing"),
        ('{"train_batch_size": 1, "optimizer": {"type": "' + LONG + '"}}', "unknown optimizer"),
    ],
    ids=["digits", "key", "inner key", "twice", "word", "text", "many keys", "one line", "optimizer"],
)
def test_the_error_is_short(tmp_path, text, said):
    message = error_of(tmp_path, text)
    assert said in message
    assert len(message) < 60_000 if "many" in said or "more" in said else len(message) < 3_000


def test_the_caret_points_into_the_part_of_a_long_line_that_is_shown(tmp_path):
    line = '{"a": [' + "1, " * 5000 + "oops]}"
    message = error_of(tmp_path, line)
    shown, caret = [text for text in message.splitlines() if " | " in text][-2:]
    assert len(shown) < 130
    assert shown[caret.index("^") :].startswith("oops")
