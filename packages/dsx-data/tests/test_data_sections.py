"""The sections as models: defaults of the field, unknown keys refused, and what is missing found at once."""

import subprocess
import sys

import pytest
from dsx_data.config import CurriculumLearning, DataEfficiency, ProgressiveLayerDrop, findings
from pydantic import ValidationError


def found(data=None, curriculum=None):
    sections = DataEfficiency(**(data or {})), CurriculumLearning(**(curriculum or {})), ProgressiveLayerDrop()
    return {item.key.removeprefix("data_efficiency."): item for item in findings(*sections)}


def test_defaults_are_the_published_ones():
    section = DataEfficiency()
    assert (section.enabled, section.seed, section.data_sampling.num_epochs) == (False, 1234, 1000)
    batching, ltd = section.data_sampling.dynamic_batching, section.data_routing.random_ltd
    assert (batching.lr_scaling_method, batching.min_batch_size, batching.sequence_picking_order) == (
        "linear",
        1,
        "dataloader",
    )
    assert (ltd.model_mask_name, ltd.model_type, ltd.hidden_state_order) == (
        "attention_mask",
        "decoder",
        "batch_seq_dim",
    )
    assert (ProgressiveLayerDrop().theta, ProgressiveLayerDrop().gamma) == (1.0, 0.001)
    assert DataEfficiency(seed=5e2).seed == 500
    for wrong in ({"sede": 1}, {"seed": "1"}, {"data_sampling": {"num_workers": -1}}):
        with pytest.raises(ValidationError):
            DataEfficiency(**wrong)


def test_values_of_deepspeeds_files_that_json_writes_in_other_ways():
    for method in ("none", "NONE", "None", None):
        sampling = {"dynamic_batching": {"lr_scaling_method": method}}
        assert DataEfficiency(data_sampling=sampling).data_sampling.dynamic_batching.lr_scaling_method == "none"
    ltd = {"random_ltd": {"model_mask_name": None}}
    assert DataEfficiency(data_routing=ltd).data_routing.random_ltd.model_mask_name is None
    for degree in (1.5, 2, 0.5):
        section = CurriculumLearning(schedule_config={"root_degree": degree})
        assert section.schedule_config.root_degree == degree
    for degree in (0, -1, float("nan"), float("inf"), True, "2"):
        with pytest.raises(ValidationError):
            CurriculumLearning(schedule_config={"root_degree": degree})


def test_sections_that_are_off_have_nothing_missing():
    assert not found()
    inside = {"data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True}}}
    assert not found({**inside, "enabled": False})
    assert not found({"enabled": True, "data_sampling": {**inside["data_sampling"], "enabled": False}})


def test_everything_that_is_missing_is_found():
    metric = {"min_difficulty": 1, "max_difficulty": 9, "schedule_type": "fixed_root", "difficulty_type": "value"}
    curriculum = {"enabled": True, "curriculum_metrics": {"m": metric}}
    batching = {"enabled": True}
    routing = {"enabled": True, "random_ltd": {"enabled": True, "layer_token_lr_schedule": {"enabled": True}}}
    data = {"enabled": True, "data_routing": routing}
    data["data_sampling"] = {"enabled": True, "curriculum_learning": curriculum, "dynamic_batching": batching}
    keys = found(data, {"enabled": True, "min_difficulty": 1})
    base = "data_sampling.curriculum_learning.curriculum_metrics.m"
    assert set(keys) == {
        "curriculum_learning.max_difficulty", "curriculum_learning.schedule_type",
        "data_sampling.dynamic_batching.enabled", "data_sampling.dynamic_batching.max_tokens",
        "data_sampling.dynamic_batching.metrics_path", f"{base}.index_to_sample_path", f"{base}.index_to_metric_path",
        f"{base}.clustering_type", f"{base}.schedule_config.total_curriculum_step",
        "data_routing.random_ltd.layer_token_lr_schedule.enabled",
        "data_routing.random_ltd.random_ltd_schedule.min_value",
    }  # fmt: skip
    assert keys["curriculum_learning.max_difficulty"].reason == "a value is missing: a schedule needs it"
    single = {**metric, "clustering_type": "single_cluster", "schedule_type": "custom"}
    assert not found({"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": {
        "enabled": True, "curriculum_metrics": {"m": single}}}})  # fmt: skip


def test_importing_the_package_does_not_load_the_sections():
    code = (
        "import sys, dsx_data; print([m for m in ('pydantic', 'dsx_comm', 'dsx_ops', 'transformers') if m in"
        " sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
