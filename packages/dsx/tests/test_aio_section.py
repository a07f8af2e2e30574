"""The `aio` section: what `dsx nvme tune` prints can be pasted; dsx-nvme owns its keys; one notice while nothing
reads it.
"""

import dataclasses
import json

import dsx
import dsx_nvme
import pytest
from dsx.cli import main
from dsx.config import load_config
from dsx_nvme.tune.space import DEFAULT


@pytest.mark.parametrize("setting", DEFAULT.all()[::9], ids=lambda s: s.name)
def test_a_section_of_the_tuner_is_accepted_with_one_notice(setting, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "aio": setting.section()}))
    assert main(["config", "check", str(path)]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("aio: read where offload_optimizer") == 1
    config = load_config(str(path), world_size=1)
    assert [w for w in config.warnings if "aio" in w] == [w for w in config.warnings if "aio: read where" in w]
    assert len([w for w in config.warnings if "aio" in w]) == 1
    found = config.aio
    assert {name: getattr(found, name) for name in setting.section()} == setting.section()


def test_the_whole_output_of_the_tuner_can_be_pasted(tmp_path, capsys):
    arguments = ["nvme", "tune", "--nvme_dir", str(tmp_path), "--io_size", "1M", "--seconds", "0.2"]
    assert main([*arguments, "--log_dir", str(tmp_path / "log")]) == 0
    out = capsys.readouterr().out
    load_config({"train_batch_size": 8, **json.loads(out[out.index("{\n") :])}, world_size=1)


def test_the_keys_are_those_of_dsx_nvme():
    fields = {f.name: f.default for f in dataclasses.fields(dsx_nvme.AioConfig)}
    section = load_config({"train_batch_size": 8}, world_size=1).aio
    assert {name: getattr(section, name) for name in type(section).model_fields} == fields
    assert load_config({"train_batch_size": 8}, world_size=1).warnings == ()


@pytest.mark.parametrize("bad", [{"queue_depth": 0}, {"block_size": "1M"}, {"use_gds": "maybe"}, {"depth": 3}], ids=str)
def test_what_is_wrong_in_it_is_refused(bad):
    with pytest.raises(dsx.DsxConfigError, match=f"aio.{next(iter(bad))}"):
        load_config({"train_batch_size": 8, "aio": bad}, world_size=1)
