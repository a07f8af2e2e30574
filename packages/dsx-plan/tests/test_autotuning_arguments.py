"""The script's command line: where its configuration stands, and options that follow the configuration."""

from __future__ import annotations

import random

import pytest
from dsx_plan.autotuning import AutotuningError
from dsx_plan.autotuning.arguments import config_position, mapped_numbers, with_config, with_mappings

MICRO = "train_micro_batch_size_per_gpu"


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "dsx.json"
    file.write_text("{}")
    return str(file)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr", "1", "--deepspeed_config", "{}", "x"], ["--lr", "1", "--deepspeed_config", "NEW", "x"]),
        (["--deepspeed_config={}"], ["--deepspeed_config=NEW"]),
        (["--deepspeed-config", "{}"], ["--deepspeed-config", "NEW"]),
        (["--dsx_config", "{}"], ["--dsx_config", "NEW"]),
        (["--deepspeed", "{}", "--bf16"], ["--deepspeed", "NEW", "--bf16"]),
        (["--deepspeed", "--deepspeed_config", "{}"], ["--deepspeed", "--deepspeed_config", "NEW"]),
        (["--config", "{}"], ["--config", "NEW"]),
        (["--config", "{}", "--deepspeed_config", "{}"], ["--config", "{}", "--deepspeed_config", "NEW"]),
    ],
)
def test_the_configuration_is_found_and_replaced(config, words, expected):
    given = [word.replace("{}", config) for word in words]
    assert config_position(given)[1] == config
    assert with_config(given, "NEW") == [word.replace("{}", config) for word in expected]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name no configuration file"),
        (["--deepspeed"], "name no configuration file"),
        (["--deepspeed", "--bf16"], "name no configuration file"),
        (["--deepspeed_config", "gone.json"], "gone.json: there is no such file"),
    ],
)
def test_a_script_without_a_configuration_file_is_told_what_to_do(words, text):
    with pytest.raises(AutotuningError, match=text):
        config_position(words)


def test_mapped_options_follow_the_configuration():
    mappings = {MICRO: "--per_device_train_batch_size", "gradient_accumulation_steps": "--accumulate",
                "fp16.enabled": "--fp16", "optimizer.params.lr": "--lr"}  # fmt: skip
    document = {MICRO: 4, "gradient_accumulation_steps": 2, "fp16": {"enabled": True},
                "optimizer": {"params": {"lr": "auto"}}}  # fmt: skip
    args = ["--per-device-train-batch-size=1", "--lr", "0.1", "--accumulate", "1"]
    assert with_mappings(args, mappings, document) == [
        "--per-device-train-batch-size=4", "--lr", "0.1", "--accumulate", "2", "--fp16", "true",
    ]  # fmt: skip
    assert args[0].endswith("=1"), "the caller's list is left alone"
    assert mapped_numbers(args, mappings) == {MICRO: 1, "gradient_accumulation_steps": 1}


def test_a_mapped_option_that_is_given_twice_follows_in_its_last_place():
    assert with_mappings(["--b", "1", "--b", "2"], {MICRO: "--b"}, {MICRO: 8}) == ["--b", "1", "--b", "8"]


def test_the_value_that_a_parser_reads_is_the_mapped_one():
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch", type=int, default=1)
    parser.add_argument("--other", default="")
    parser.add_argument("rest", nargs="*")
    generator = random.Random(0)
    pieces = [["--batch", "3"], ["--batch=5"], ["-b", "7"], ["--other", "x"], ["file"]]
    for _ in range(200):
        words = [word for piece in generator.sample(pieces, generator.randrange(5)) for word in piece]
        if "-b" in words:
            continue  # another spelling is another option to the tuner; the mapping names the one it follows
        mapped = with_mappings(words, {MICRO: "--batch"}, {MICRO: 9})
        assert parser.parse_args(mapped).batch == 9
        assert parser.parse_args(mapped).other == parser.parse_args(words).other
