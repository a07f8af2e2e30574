"""The folder around checkpoints: `latest`, leftovers of killed saves, two jobs in one folder, files of others."""

import logging
import os
import re
import shutil
from pathlib import Path

import dsx
import pytest
import torch
from dsx.checkpoint import CheckpointArgumentError, CheckpointCorruptError, CheckpointError, open_checkpoint
from dsx_checkpoint.command import main as checkpoint_command
from dsx_checkpoint.saving_lock import saving
from dsx_testkit import run_ranks


def build(seed=0):
    torch.manual_seed(seed)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None}
    engine = dsx.initialize(model=torch.nn.Linear(3, 2), config=config)[0]
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    return engine


@pytest.fixture(scope="module")
def engine():
    return build()


@pytest.fixture
def saved(engine, tmp_path):
    """A folder with the checkpoint `good`."""
    engine.save_checkpoint(str(tmp_path), tag="good")
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# - `latest`


@pytest.mark.parametrize(
    "text", ["../outside", "/{root}/good", "good/../good", "..", ".", "", ".hidden", "g\0d", "g/\n"]
)
def test_a_latest_that_names_no_tag_is_refused(engine, saved, text):
    shutil.copytree(saved / "good", saved.parent / "outside", dirs_exist_ok=True)
    (saved / "latest").write_text(text.format(root=saved))
    with pytest.raises(CheckpointError, match=r"latest: .*expected a plain folder name.* checkpoints there: good"):
        engine.load_checkpoint(str(saved))
    assert engine.load_checkpoint(str(saved), tag="good")[0] == str(saved / "good")


def test_whitespace_around_the_tag_is_no_matter(engine, saved):
    (saved / "latest").write_text("good\n")
    assert engine.load_checkpoint(saved)[0] == str(saved / "good")


@pytest.mark.parametrize("tag", ["../outside", "/etc", "", ".hidden", "a/b"])
def test_a_tag_that_is_no_plain_name_is_refused(engine, saved, tag):
    for call in (engine.load_checkpoint, engine.save_checkpoint):
        with pytest.raises(ValueError, match="expected a plain folder name"):
            call(str(saved), tag=tag)
    assert names(saved) == ["good", "latest"]


def test_where_latest_is_lost_the_newest_that_it_was_to_name_is_taken_and_said(engine, saved, caplog):
    engine.save_checkpoint(saved, tag="damaged")
    engine.save_checkpoint(saved, tag="newer")
    engine.save_checkpoint(saved, tag="other", save_latest=False)
    for age, tag in enumerate(("newer", "good", "damaged")):
        os.utime(saved / tag / "dsx.json", ns=(10**18 - age, 10**18 - age))
    (saved / "latest").unlink()
    with caplog.at_level(logging.WARNING, logger="dsx"):
        assert engine.load_checkpoint(saved)[0] == str(saved / "newer")
    assert [m for m in caplog.messages if "has no file 'latest'; taking the newest checkpoint there, newer" in m]
    os.utime(saved / "damaged" / "dsx.json", ns=(2 * 10**18, 2 * 10**18))
    (saved / "damaged" / "dsx.json").write_text("{")
    with caplog.at_level(logging.WARNING, logger="dsx"):
        assert engine.load_checkpoint(saved)[0] == str(saved / "newer")
    assert [m for m in caplog.messages if "damaged: passed over" in m]


def test_checkpoints_that_were_never_the_latest_are_listed_and_not_taken(engine, tmp_path):
    for tag in ("good", "other"):
        engine.save_checkpoint(tmp_path, tag=tag, save_latest=False)
    with pytest.raises(CheckpointError, match="has no file 'latest', but these checkpoints: good, other; pass the tag"):
        engine.load_checkpoint(tmp_path)


def test_the_first_checkpoints_of_version_2_do_not_say_whether_they_were_the_latest(tmp_path):
    golden = Path(__file__).parent / "golden" / "v2" / "sgd-fp16-stage0-1rank"
    shutil.copytree(golden, tmp_path / "old")
    assert open_checkpoint(tmp_path / "old").folder.name == "global_step4"
    (tmp_path / "old" / "latest").unlink()
    with pytest.raises(CheckpointError, match="but these checkpoints: global_step4; pass the tag"):
        open_checkpoint(tmp_path / "old")


def test_a_folder_without_checkpoints_is_no_error(engine, tmp_path):
    assert engine.load_checkpoint(tmp_path) == (None, {})
    assert engine.load_checkpoint(tmp_path / "not there") == (None, {})
    (tmp_path / "notes.txt").write_text("mine")
    assert engine.load_checkpoint(tmp_path) == (None, {})


def test_a_folder_that_is_a_file_is_refused(engine, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        engine.load_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file"):
        engine.save_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("kind", ["folder", "dangling", "loop", "fifo", "/dev/zero"])
def test_a_latest_that_is_no_file_is_refused_and_does_not_hang(engine, saved, kind):
    latest = saved / "latest"
    latest.unlink()
    if kind == "folder":
        latest.mkdir()
    elif kind == "fifo":
        os.mkfifo(latest)
    else:
        latest.symlink_to({"loop": "latest", "dangling": "gone"}.get(kind, kind))
    with pytest.raises(CheckpointError, match="latest"):
        engine.load_checkpoint(saved)


# - Arguments


@pytest.mark.parametrize("folder", ["", None, 3])
def test_a_folder_that_is_none_is_refused_as_a_value(engine, folder):
    for call in (engine.load_checkpoint, engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(ValueError, match="expected the path of a folder"):
            call(folder)


def test_client_state_is_a_dictionary(engine, tmp_path):
    with pytest.raises(ValueError, match="client_state: got list"):
        engine.save_checkpoint(tmp_path, client_state=[1])
    assert names(tmp_path) == []


# - Killed saves and other jobs


def test_the_next_save_clears_what_killed_saves_of_any_tag_left(engine, saved):
    (saved / ".tmp-global_step7-0123456789ab").mkdir()
    (saved / ".tmp-global_step7-0123456789ab" / "model.safetensors").write_bytes(b"x" * 1000)
    shutil.copytree(saved / "good", saved / ".old-good-0123456789ab")
    (saved / ".latest.12345").write_text("glob")
    (saved / ".saving").write_text("process 1 on a host that is gone")
    (saved / ".tmp-mine").mkdir()
    (saved / ".latest.txt").write_text("mine")
    engine.save_checkpoint(saved, tag="next")
    assert names(saved) == [".latest.txt", ".tmp-mine", "good", "latest", "next"], "what has another form is not ours"


def test_a_tag_whose_only_copy_lies_under_its_replaced_name_gets_its_name_back(engine, saved):
    (saved / "good").rename(saved / ".old-good-0123456789ab")
    assert engine.load_checkpoint(saved)[0] == str(saved / ".old-good-0123456789ab")
    engine.save_checkpoint(saved, tag="next", save_latest=False)
    assert names(saved) == ["good", "latest", "next"]
    assert engine.load_checkpoint(saved)[0] == str(saved / "good")


def test_a_second_job_in_the_folder_is_named_and_destroys_nothing(engine, saved):
    with saving(saved, "theirs"):
        (saved / ".tmp-theirs-0123456789ab").mkdir()
        with pytest.raises(
            CheckpointError, match=rf"another job is saving here .*process {os.getpid()} on .*, tag theirs"
        ):
            engine.save_checkpoint(saved, tag="mine")
        assert names(saved) == [".saving", ".tmp-theirs-0123456789ab", "good", "latest"]
    engine.save_checkpoint(saved, tag="mine")
    assert names(saved) == ["good", "latest", "mine"]


def save_at_once(rank, world, folder):
    """Two jobs of one process each, which save the same tag again and again."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    engine = build()
    refused = 0
    for _ in range(15):
        try:
            engine.save_checkpoint(folder, tag="same")
        except CheckpointError as error:
            assert "another job is saving here" in str(error), error
            refused += 1
    return refused


def test_two_jobs_at_once_never_destroy_each_others_checkpoint(engine, tmp_path):
    run_ranks(save_at_once, 2, str(tmp_path), backend=None)
    assert set(names(tmp_path)) <= {"latest", "same", ".saving"}
    assert checkpoint_command(["verify", str(tmp_path)]) == 0


def test_a_file_system_without_locks_clears_only_leftovers_of_the_same_tag(engine, saved, monkeypatch):
    import fcntl

    def unsupported(fd, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for tag in ("one", "two"):
        (saved / f".tmp-{tag}-0123456789ab").mkdir()
    engine.save_checkpoint(saved, tag="one")
    assert names(saved) == [".saving", ".tmp-two-0123456789ab", "good", "latest", "one"]


def test_a_leftover_that_cannot_be_removed_is_said_and_no_error(engine, saved, monkeypatch, caplog):
    (saved / ".tmp-x-0123456789ab").mkdir()

    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", denied)
    with caplog.at_level(logging.WARNING, logger="dsx"):
        engine.save_checkpoint(saved, tag="next")
    assert [m for m in caplog.messages if "cannot be removed" in m] and open_checkpoint(saved).folder.name == "next"


# - What others put there


def test_files_of_others_are_listed_and_left_alone(engine, saved, capsys):
    for name in ("config.json", "tokenizer.json", "notes"):
        (saved / "good" / name).write_text("{}")
    assert engine.load_checkpoint(saved)[0] == str(saved / "good")
    assert checkpoint_command(["verify", str(saved)]) == 0
    assert "not looked at: config.json, notes, tokenizer.json" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["dsx.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "gone", "device"])
def test_what_is_no_file_in_the_place_of_one_is_refused_and_does_not_hang(engine, saved, name, kind):
    path = saved / "good" / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=re.escape(name) if name != "dsx.json" else "good"):
        engine.load_checkpoint(saved)
    assert checkpoint_command(["verify", str(saved)]) == 1


DEEPSPEED = [
    "global_step3/mp_rank_00_model_states.pt",
    "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "global_step3/layer_00-model_00-model_states.pt",
    "global_step3/layer_0_expert_1_mp_rank_00_model_states.pt",
    "zero_to_fp32.py",
]


@pytest.mark.parametrize("file", DEEPSPEED)
@pytest.mark.parametrize("latest", [True, False])
def test_a_checkpoint_of_deepspeed_is_recognised(engine, tmp_path, file, latest):
    (tmp_path / "global_step3").mkdir()
    (tmp_path / file).write_bytes(b"")
    (tmp_path / "zero_to_fp32.py").write_text("")
    if latest:
        (tmp_path / "latest").write_text("global_step3")
    if latest and "/" not in file:
        (tmp_path / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint of DeepSpeed .*dsx checkpoint import"):
        engine.load_checkpoint(tmp_path)


def test_errors_do_not_repeat_megabytes(engine, saved):
    index = saved / "good" / "dsx.json"
    index.write_text(index.read_text().replace('"excluded"', '"' + "x" * 1_000_000 + '"'))
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(saved)
    assert len(str(caught.value)) < 2000
    with pytest.raises(CheckpointArgumentError) as caught:
        engine.load_checkpoint(saved, tag="y" * 100_000 + "/")
    assert len(str(caught.value)) < 2000
    (saved / "latest").write_text("z/" * 500_000)
    with pytest.raises(CheckpointCorruptError) as caught:
        engine.load_checkpoint(saved)
    assert len(str(caught.value)) < 2000
    assert Path(saved).is_dir()
