"""What a search writes about itself holds no secret of the configuration, which the script is given whole."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from dsx_plan.autotuning.experiments import Job, run_experiment

SCRIPT = """
import json, os, sys
path = sys.argv[1]
open("seen.json", "w").write(json.dumps({"config": json.load(open(path)), "mode": os.stat(path).st_mode & 0o777}))
"""


def job(folder, args):
    def start(words, out, err):
        return subprocess.Popen([sys.executable, "-c", SCRIPT, words[-1]], stdout=out, stderr=err, cwd=folder)

    return Job("train.py", tuple(args), 1, start, lambda words: 0, " ".join, lambda line: None)


def run(tmp_path, document):
    (tmp_path / "ds.json").write_text("{}")
    run_experiment(job(tmp_path, ["--deepspeed_config", "ds.json"]), tmp_path / "exp", document, {}, 60)
    return json.loads((tmp_path / "seen.json").read_text()), tmp_path / "exp"


def test_the_script_gets_the_key_and_no_file_keeps_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = {"comet": {"enabled": True, "api_key": "very-private"}, "proxy": "http://me:very-private@host/"}
    seen, folder = run(tmp_path, document)
    assert seen == {"config": document, "mode": stat.S_IRUSR | stat.S_IWUSR}
    shown = json.loads((folder / "ds_config.json").read_text())
    assert (folder / "command.txt").read_text().split()[-1] == str(folder / "ds_config.json")
    assert shown["comet"] == {"enabled": True, "api_key": "***"} and shown["proxy"] == "http://***@host/"
    assert not any("very-private" in path.read_text() for path in folder.iterdir())


def test_without_secrets_there_is_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen, folder = run(tmp_path, {"max_tokens": 5, "comet": {"api_key": ""}})
    assert seen["config"] == json.loads((folder / "ds_config.json").read_text())
    assert Path(folder / "command.txt").read_text().split()[-1] == str(folder / "ds_config.json")


def test_what_is_removed_is_gone_when_the_script_cannot_be_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")

    def start(words, out, err):
        raise OSError("no such program")

    failing = Job("train.py", ("--deepspeed_config", "ds.json"), 1, start, lambda w: 0, " ".join, lambda line: None)
    with pytest.raises(OSError, match="no such program"):
        run_experiment(failing, tmp_path / "exp", {"comet": {"api_key": "very-private"}}, {}, 60)
    assert not any("very-private" in path.read_text() for path in (tmp_path / "exp").iterdir())
