"""An import never takes a part of a model for the whole: whatever is missing in the files of another program, or stands
in the place of something else, is a named error, and nothing is written.
"""

import json
import shutil

import pytest
import torch
from dsx_checkpoint import CheckpointError, read_foreign
from dsx_testkit.deepspeed_layout import build, train, write_experts, write_stage3, write_stage12, write_universal
from safetensors.torch import load_file, save_file


def refused(path, match):
    from dsx_checkpoint.foreign.source import write_source

    with pytest.raises(CheckpointError, match=match):
        write_source(read_foreign(path), path.parent / "out", "t")
    assert not list((path.parent / "out").glob("*/dsx.json"))


def edited(path, change):
    saved = torch.load(path, weights_only=False)
    change(saved)
    torch.save(saved, path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of the same engine in DeepSpeed's layouts."""
    root = tmp_path_factory.mktemp("deepspeed")
    engine = build()
    train(engine, 0, 3)
    write_stage12(engine, root / "mapped", 1)
    write_stage12(engine, root / "ordered", 2, mapping=False)
    write_stage3(engine, root / "stage3")
    write_universal(engine, root / "universal")
    return root


@pytest.fixture
def copy(written, tmp_path):
    def make(kind):
        shutil.copytree(written / kind, tmp_path / kind)
        return next(path for path in (tmp_path / kind).iterdir() if path.is_dir())

    return make


def model_file(tag, rank=0):
    return next(
        path for path in (tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt")
        if path.is_file()
    )  # fmt: skip


def optim_file(tag, rank):
    return tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


# - DeepSpeed: rows of masters that are not used up


@pytest.mark.parametrize("kind", ["stage3", "ordered"])
def test_rows_of_masters_have_to_be_used_up(copy, kind):
    tag = copy(kind)
    for rank in range(2 if kind == "stage3" else 1):
        edited(model_file(tag, rank), lambda head: head["param_shapes"][0].pop("b.weight"))
    refused(tag, "names or rows are missing")


def test_elements_before_the_rows_are_noticed(copy):
    """Every parameter would be shifted."""
    tag = copy("stage3")
    for rank in range(2):
        edited(optim_file(tag, rank), lambda saved: shift(saved["optimizer_state_dict"]["fp32_flat_groups"]))
    refused(tag, "names or rows are missing")


def shift(rows):
    rows[0] = torch.cat([torch.zeros(5), rows[0].detach()])


@pytest.mark.parametrize("kind, key", [("stage3", "fp32_flat_groups"), ("mapped", "single_partition_of_fp32_groups")])
def test_masters_are_floating_point_numbers(copy, kind, key):
    tag = copy(kind)

    def change(saved):
        rows = saved["optimizer_state_dict"][key]
        rows[0] = rows[0].detach().long()

    edited(optim_file(tag, 1), change)
    refused(tag, "expected one floating-point dtype")


def test_a_rank_with_fewer_groups_is_noticed(copy):
    tag = copy("stage3")
    edited(optim_file(tag, 1), lambda saved: saved["optimizer_state_dict"]["fp32_flat_groups"].pop())
    refused(tag, "other numbers of flat groups")


# - DeepSpeed: parameters without masters or states


def test_the_file_of_one_rank_in_the_place_of_another_is_noticed(copy):
    tag = copy("mapped")
    shutil.copy(optim_file(tag, 0), optim_file(tag, 1))
    refused(tag, "more than shape|no masters of")


def test_trained_parameters_have_masters(copy):
    tag = copy("mapped")
    for rank in range(2):
        edited(
            optim_file(tag, rank),
            lambda saved: saved["optimizer_state_dict"]["param_slice_mappings"][0].pop("b.weight", None),
        )
    refused(tag, "no masters of 1 parameters that are trained, such as 'b.weight'")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_one_rank_lacks_is_noticed(copy, rank):
    tag = copy("mapped")

    def change(saved):
        del saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]

    edited(optim_file(tag, rank), change)
    refused(tag, "'exp_avg' is missing on a rank")


def test_a_state_of_another_length_is_noticed(copy):
    tag = copy("stage3")

    def change(saved):
        state = saved["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]
        state["exp_avg"] = torch.cat([torch.zeros(2), state["exp_avg"]])

    edited(optim_file(tag, 0), change)
    refused(tag, "'exp_avg' has other lengths than the sub-groups")


def test_states_that_are_not_there_at_all_are_a_warning(copy, caplog):
    tag = copy("mapped")
    for rank in range(2):
        optim_file(tag, rank).unlink()
    found = read_foreign(tag)
    assert not found.states and any("only weights are imported" in message for message in caplog.messages)


def test_exchanged_files_of_ranks_are_a_warning(copy, caplog):
    tag = copy("mapped")
    read_foreign(tag)
    assert not any("exchanged" in message for message in caplog.messages)
    optim_file(tag, 0).rename(tag / "kept")
    optim_file(tag, 1).rename(optim_file(tag, 0))
    (tag / "kept").rename(optim_file(tag, 1))
    read_foreign(tag)
    assert any("exchanged" in message for message in caplog.messages)


# - DeepSpeed: files


@pytest.mark.parametrize("kind", ["mapped", "ordered", "stage3"])
def test_the_file_of_the_last_rank_is_missed(copy, kind):
    tag = copy(kind)
    optim_file(tag, 1).unlink()
    refused(tag, "was saved by 2 ranks")


def test_files_of_two_saves_are_refused(copy):
    tag = copy("mapped")
    shutil.copy(optim_file(tag, 0), tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused(tag, "files of two saves")


@pytest.mark.parametrize("missing", ["fp32.pt", None])
def test_a_parameter_that_a_universal_checkpoint_lacks_is_missed(copy, missing):
    tag = copy("universal")
    if missing is None:
        shutil.rmtree(tag / "zero" / "b.weight")
    else:
        (tag / "zero" / "b.weight" / missing).unlink()
    refused(tag, "b.weight")


def test_a_model_parallel_rank_is_missed(copy):
    tag = copy("mapped")
    edited(model_file(tag), lambda head: head.update(mp_world_size=2))
    refused(tag, "was saved by 2 model-parallel ranks")


def test_a_slice_of_a_layer_is_missed(tmp_path):
    tag = tmp_path / "tag"
    tag.mkdir()
    torch.save({"module": None, "universal_checkpoint_info": {}}, tag / "mp_rank_00_model_states.pt")
    for layer, part in ((0, 0), (0, 1), (1, 0)):
        torch.save({"weight": torch.ones(2)}, tag / f"layer_{layer:02d}-model_{part:02d}-model_states.pt")
    refused(tag, "layer 1 has those of the model-parallel ranks")


def test_a_layer_of_a_pipeline_that_has_no_file_comes_from_its_masters_or_is_missed(copy):
    tag = copy("mapped")
    expected = read_foreign(tag).parameters["b.weight"].fetch().clone()  # the file is written again
    edited(model_file(tag), lambda head: head["module"].pop("b.weight"))
    assert torch.equal(read_foreign(tag).parameters["b.weight"].fetch(), expected)
    edited(model_file(tag), lambda head: head["module"].pop("table"))  # a buffer, which has no master
    refused(tag, "1 tensors of the model are in no file, such as 'table'")


def test_tied_layers_of_a_pipeline_are_not_missed(tmp_path):
    """DeepSpeed saves them in the files of layers, and speaks of them as `tied_modules`."""
    tag = tmp_path / "tag"
    tag.mkdir()
    head = {"module": None, "buffer_names": ["tied_modules.embed.table"], "frozen_param_shapes": {}}
    torch.save(head, tag / "mp_rank_00_model_states.pt")
    torch.save({"weight": torch.ones(2), "table": torch.arange(2)}, tag / "layer_00-model_00-model_states.pt")
    assert set(read_foreign(tag).parameters) == {"0.weight", "0.table"}
    torch.save({**head, "buffer_names": ["1.table"]}, tag / "mp_rank_00_model_states.pt")
    refused(tag, "'1.table'")


@pytest.mark.parametrize("missing", [1, 3])
def test_an_expert_is_missed(tmp_path, missing):
    tag = tmp_path / "tag"
    tag.mkdir()
    write_experts(tag, 0, 2)
    edited(tag / "mp_rank_00_model_states.pt", lambda head: head.update(num_experts=[4]))
    assert read_foreign(tag).states
    (tag / f"layer_0_expert_{missing}_mp_rank_00_model_states.pt").unlink()
    refused(tag, "files (are missing|of experts of layer 0 are missing)")


@pytest.mark.parametrize("text", ["x" * 100_000, "a/b", "..", "\0", "", "latest"])
def test_a_latest_that_names_no_folder_is_a_named_error(copy, text):
    root = copy("mapped").parent
    (root / "latest").write_text(text)
    refused(root, "got no checkpoint that can be imported")


# - Hugging Face


def hugging_face(folder, index=True, suffix="safetensors"):
    folder.mkdir()
    parts = [{"a": torch.arange(3.0)}, {"b": torch.ones(2), "c": torch.zeros(1)}]
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = [f"{stem}-{n + 1:05}-of-00002.{suffix}" for n in range(2)]
    for name, part in zip(names, parts):
        (save_file if suffix == "safetensors" else torch.save)(part, folder / name)
    if index:
        weight_map = {key: name for name, part in zip(names, parts) for key in part}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / name for name in names]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_missed(tmp_path, index, suffix):
    for number in range(2):
        folder = tmp_path / f"hf{number}"
        shards = hugging_face(folder, index, suffix)
        assert set(read_foreign(folder).parameters) == {"a", "b", "c"}
        shards[number].unlink()
        refused(folder, "missing")


def test_a_tensor_of_the_index_is_missed(tmp_path):
    shards = hugging_face(tmp_path / "hf")
    part = load_file(shards[1])
    del part["b"]
    save_file(part, shards[1])
    refused(tmp_path / "hf", "has no 'b', which the index says lies there")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 1}}', "not JSON"])
def test_a_damaged_index_is_refused(tmp_path, text):
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(text)
    refused(tmp_path / "hf", "index.json: is damaged")


def test_files_that_the_index_does_not_name_are_not_read(tmp_path):
    hugging_face(tmp_path / "hf")
    save_file({"a": torch.zeros(3)}, tmp_path / "hf" / "consolidated.safetensors")
    assert torch.equal(read_foreign(tmp_path / "hf").parameters["a"].fetch(), torch.arange(3.0))


def test_bytes_of_a_tensor_that_was_taken_out_of_the_header_are_missed(tmp_path):
    """As the library of safetensors refuses such files."""
    values = {"a": torch.arange(4.0), "b": torch.ones(4), "c": torch.zeros(4)}
    for gone in values:
        save_file(values, tmp_path / "w.safetensors")
        data = (tmp_path / "w.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        del header[gone]
        text = json.dumps(header).encode()
        (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        refused(tmp_path / "w.safetensors", "does not follow|belong to no tensor")


def test_a_state_dict_beside_nested_ones_says_what_it_leaves_out(tmp_path, caplog):
    torch.save({"a": torch.ones(2), "blocks": {"b": torch.ones(2)}, "epoch": 3}, tmp_path / "w.pt")
    assert set(read_foreign(tmp_path / "w.pt").parameters) == {"a"}
    assert any("left out" in message and "blocks" in message for message in caplog.messages)


# - torch.distributed.checkpoint


def distributed(folder, state):
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_data_file_that_is_missing_is_named(tmp_path):
    folder = distributed(tmp_path / "dcp", {"model": {"w": torch.arange(6.0)}})
    next(folder.glob("*.distcp")).unlink()
    refused(folder, r"cannot be read .*distcp")


def test_states_without_weights_of_their_name_are_a_warning(tmp_path, caplog):
    states = {"state": {"module.w": {"exp_avg": torch.ones(6)}}, "param_groups": {"module.w": {"lr": 0.1}}}
    folder = distributed(tmp_path / "dcp", {"model": {"w": torch.arange(6.0)}, "optim": states})
    assert not read_foreign(folder).states
    assert any("optimizer states of 1 of 1 names are left out" in message for message in caplog.messages)


def test_two_models_in_one_folder_are_not_mixed(tmp_path):
    folder = distributed(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "module": {"w": torch.zeros(2)}})
    refused(folder, "'w' stands twice")
