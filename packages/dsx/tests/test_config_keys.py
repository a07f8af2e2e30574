"""Every documented key is known, and every mistyped one finds its way back."""

from __future__ import annotations

import base64
import random
import string
from typing import Any

import pytest
from dsx.config import DsxConfigError, load_config
from dsx.config.availability import asks_for
from dsx.config.sections import whole_model
from dsx.config.translate import all_paths, known_names
from dsx_core.errors import edits, nearest

BATCH = {"train_micro_batch_size_per_gpu": 1}
Root = whole_model()
PATHS = sorted(set(all_paths(Root)))

# The keys of the published configuration reference and feature tables, one line per object.
DOCUMENTED = """
: train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler
: communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients fp16 bf16 amp
: gradient_clipping zero_optimization aio
: steps_per_print wall_clock_breakdown dump_state autotuning flops_profiler activation_checkpointing sparse_attention
: data_efficiency curriculum_learning tensorboard wandb comet csv_monitor elasticity comms_logger compression_training
: checkpoint data_types gradient_allreduce_op seq_parallel_communication_data_type disable_allgather memory_breakdown
: dataloader_drop_last vocabulary_size log_level timers use_data_before_expert_parallelism zero_allow_untested_optimizer
: zero_force_ds_cpu_optimizer managed_gradient_accumulation disable_python_gc torch_autocast pipeline nebula
: quantize_training eigenvalue progressive_layer_drop hybrid_engine graph_harvesting tensor_parallel compile
optimizer: type params legacy_fusion
scheduler: type params
fp16: enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
fp16: min_loss_scale fp16_master_weights_and_grads
bf16: enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
amp: enabled opt_level
torch_autocast: enabled dtype lower_precision_safe_modules
data_types: grad_accum_dtype param_dtype buffer_dtype
zero_optimization: stage allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size
zero_optimization: contiguous_gradients grad_hooks round_robin_gradients offload_param offload_optimizer
zero_optimization: stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
zero_optimization: stage3_param_persistence_threshold sub_group_size elastic_checkpoint ignore_unused_parameters
zero_optimization: stage3_gather_16bit_weights_on_model_save cpu_offload load_from_fp32_weights legacy_stage1
zero_optimization: compute_grad_norm parameter_alignment cpu_offload_param
zero_optimization: use_multi_rank_bucket_allreduce cpu_offload_params cpu_offload_use_pin_memory
zero_optimization: stage3_model_persistence_threshold stage3_module_granularity_threshold
zero_optimization: stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential zero_hpz_partition_size
zero_optimization: zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
zero_optimization: zeropp_loco_param
zero_optimization: mics_shard_size mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
zero_optimization: override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module zenflow
zero_optimization.offload_param: device nvme_path pin_memory buffer_count buffer_size max_in_cpu
zero_optimization.offload_optimizer: device nvme_path pin_memory buffer_count fast_init ratio
zero_optimization.offload_optimizer: pipeline_read pipeline_write
zero_optimization.zeropp_loco_param: err_beta reset_T
zero_optimization.leaf_module: classes names name_suffixes
aio: block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds
autotuning: enabled results_dir exps_dir overwrite metric start_profile_step end_profile_step fast max_train_batch_size
autotuning: mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials arg_mappings num_nodes
autotuning: num_gpus min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu
autotuning: model_info
autotuning.model_info: profile num_params hidden_size num_layers
flops_profiler: enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor
activation_checkpointing: partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
activation_checkpointing: synchronize_checkpoint_boundary profile
sparse_attention: mode block different_layout_per_head num_local_blocks num_global_blocks attention
sparse_attention: horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks
sparse_attention: global_block_indices global_block_end_indices num_sliding_window_blocks
data_efficiency: enabled seed data_routing data_sampling
data_efficiency.data_routing: enabled random_ltd
data_efficiency.data_routing.random_ltd: enabled total_layer_num random_ltd_layer_num random_ltd_layer_id
data_efficiency.data_routing.random_ltd: model_mask_name
data_efficiency.data_routing.random_ltd: model_type hidden_state_order random_ltd_schedule layer_token_lr_schedule
data_efficiency.data_routing.random_ltd.random_ltd_schedule: min_value max_value schedule_type schedule_config
data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config: require_steps seq_per_step
data_efficiency.data_sampling: enabled num_epochs num_workers pin_memory curriculum_learning dynamic_batching
data_efficiency.data_sampling.dynamic_batching: enabled metrics_path lr_scaling_method min_batch_size max_batch_size
data_efficiency.data_sampling.dynamic_batching: sequence_picking_order max_tokens verbose
data_efficiency.data_sampling.curriculum_learning: enabled data_cluster_path curriculum_metrics
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*: index_to_sample_path index_to_metric_path
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*: difficulty_type clustering_type min_difficulty
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*: max_difficulty schedule_type schedule_config
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config: total_curriculum_step
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config: difficulty_step root_degree
curriculum_learning: enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config
curriculum_learning.schedule_config: total_curriculum_step difficulty_step root_degree difficulty max_step
tensorboard: enabled output_path job_name
wandb: enabled group team project
comet: enabled workspace project samples_log_interval experiment_name experiment_key online mode api_key
csv_monitor: enabled output_path job_name
elasticity: enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_large_batch version
elasticity: prefer_larger_batch ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size
comms_logger: enabled verbose prof_all prof_ops debug
compression_training: layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning
compression_training: head_pruning channel_pruning
compression_training.layer_reduction: enabled keep_number_layer module_name_prefix teacher_layer other_module_name
compression_training.weight_quantization.shared_parameters: enabled quantizer_kernel schedule_offset quantize_groups
compression_training.weight_quantization.shared_parameters: quantize_verbose quantization_type rounding
compression_training.weight_quantization.shared_parameters: quantize_weight_in_forward fp16_mixed_quantize
compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize: enabled quantize_change_ratio
compression_training.weight_quantization.different_groups.*: params modules
compression_training.weight_quantization.different_groups.*.params: start_bits target_bits quantization_period
compression_training.activation_quantization.shared_parameters: enabled quantization_type range_calibration
compression_training.activation_quantization.shared_parameters: schedule_offset
compression_training.activation_quantization.different_groups.*.params: bits
compression_training.sparse_pruning.shared_parameters: enabled schedule_offset schedule_offset_end
compression_training.sparse_pruning.shared_parameters: schedule_offset_stride
compression_training.sparse_pruning.shared_parameters: method block_pattern dense_ratio excluded_modules
compression_training.sparse_pruning.different_groups.*: params modules related_modules
compression_training.sparse_pruning.different_groups.*.params: dense_ratio
compression_training.row_pruning.shared_parameters: enabled schedule_offset method
compression_training.head_pruning.shared_parameters: enabled schedule_offset method num_heads
compression_training.channel_pruning.shared_parameters: enabled schedule_offset method
checkpoint: tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer
checkpoint.parallel_write: pipeline_stage
checkpoint.writer: type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier
timers.throughput: enabled synchronized
pipeline: stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned
pipeline: use_reentrant
eigenvalue: enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num
progressive_layer_drop: enabled theta gamma
hybrid_engine: enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
hybrid_engine: tp_gather_partition_size
"""


def documented():
    for line in DOCUMENTED.strip().splitlines():
        section, _, keys = line.partition(": ") if not line.startswith(":") else ("", "", line[1:])
        for key in keys.split():
            yield section, key


@pytest.mark.parametrize(("section", "key"), list(documented()))
def test_every_documented_key_is_in_the_schema(section, key):
    assert key in known_names(Root, tuple(section.split(".")) if section else ())


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return a configuration in which only ``path`` is set."""
    for part in reversed(path.split(".")):
        value = {"group" if part == "*" else part: value}
    return {**BATCH, **value}


def mutations(name: str, random_: random.Random) -> list[str]:
    """One of each: a letter replaced, dropped, doubled, swapped with its neighbour."""
    at = random_.randrange(len(name))
    letter = random_.choice([other for other in string.ascii_lowercase if other != name[at]])
    swapped = name[: max(0, at - 1)] + name[max(0, at - 1) : at + 1][::-1] + name[at + 1 :]
    return [name[:at] + letter + name[at + 1 :], name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], swapped]


def test_a_wrong_key_in_an_item_of_a_list_is_named():
    rules = [{"patterns": ["fc"], "partition_type": "row"}, {"patterns": ["up"], "gatuer_output": True}]
    document = {**BATCH, "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": rules}}}
    with pytest.raises(DsxConfigError, match=r"layer_specs.*gatuer_output"):
        load_config(document, world_size=1)


def test_one_wrong_character_in_any_key_is_named_and_undone():
    """For every key of the schema: the error names what was written and offers what was meant."""
    random_ = random.Random(7)
    tried = 0
    for path in PATHS:
        prefix, _, name = path.rpartition(".")
        if "layer_specs." in path:
            continue  # an item of a list; see test_a_wrong_key_in_an_item_of_a_list_is_named
        siblings = known_names(
            Root, tuple("group" if part == "*" else part for part in prefix.split(".")) if prefix else ()
        )
        for wrong in random_.sample(mutations(name, random_), 1):
            if not wrong or wrong in siblings:
                continue
            tried += 1
            shown = f"{prefix}.{wrong}".lstrip(".").replace("*", "group")
            with pytest.raises(DsxConfigError) as caught:
                load_config(nested(f"{prefix}.{wrong}".lstrip("."), 1), world_size=1)
            found = [problem for problem in caught.value.problems if problem.path == shown]
            assert [problem.kind for problem in found] == ["unknown-key"], (path, wrong)
            assert f'"{wrong}"' in str(found[0])
            if len(name) > 2:
                meant = f"{prefix}.{name}".lstrip(".").replace("*", "group")
                assert meant in found[0].expected.split(" or "), (path, wrong, found[0].expected)
    assert tried > 400


EXAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    # name -> (the published example, what is refused today; empty when nothing is)
    "optimizer with Adam": (
        {"optimizer": {"type": "Adam", "params": {
            "lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}}, "",
    ),
    "1-bit Adam": (
        {"optimizer": {"type": "OneBitAdam", "params": {
            "lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "freeze_step": 400,
            "cuda_aware": False, "comm_backend_name": "nccl"}}}, "",
    ),
    "0/1 Adam": (
        {"optimizer": {"type": "ZeroOneAdam", "params": {
            "lr": 1e-3, "weight_decay": 0.01, "bias_correction": False, "var_freeze_step": 1000,
            "var_update_scaler": 16, "local_step_scaler": 1000, "local_step_clipper": 16, "cuda_aware": False,
            "comm_backend_name": "nccl"}}},
        "",
    ),
    "1-bit Lamb": (
        {"optimizer": {"type": "OneBitLamb", "params": {
            "lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01,
            "freeze_step": 1000, "cuda_aware": False, "comm_backend_name": "nccl", "coeff_beta": 0.9,
            "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}}}, "",
    ),
    "scheduler": (
        {"scheduler": {"type": "WarmupLR", "params": {
            "warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}}, "",
    ),
    "range test": (
        {"scheduler": {"type": "LRRangeTest", "params": {
            "lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 200, "lr_range_test_step_rate": 5,
            "lr_range_test_staircase": False}}}, "",
    ),
    "1cycle": (
        {"scheduler": {"type": "OneCycle", "params": {
            "cycle_min_lr": 0.002, "cycle_max_lr": 0.005, "cycle_first_step_size": 2000,
            "cycle_second_step_size": 2000}}}, "",
    ),
    "fp16": (
        {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
                  "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1}}, "",
    ),
    "bf16": ({"bf16": {"enabled": True}}, ""),
    "amp": ({"amp": {"enabled": True, "opt_level": "O1"}}, ""),
    "clipping": ({"gradient_clipping": 1.0}, ""),
    "zero without offload": (
        {"zero_optimization": {
            "stage": 3, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
            "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6, "sub_group_size": 1e12, "elastic_checkpoint": True,
            "stage3_gather_16bit_weights_on_model_save": True, "ignore_unused_parameters": True,
            "round_robin_gradients": True}}, "",
    ),
    "parameter offload": (
        {"zero_optimization": {"stage": 3, "offload_param": {
            "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8,
            "max_in_cpu": 1e9}}}, "",
    ),
    "optimizer offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {
            "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "ratio": 0.3, "buffer_count": 4,
            "fast_init": False}}}, "",
    ),
    "quantised collectives": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True,
                               "zero_hpz_partition_size": 8}}, "",
    ),
    "file I/O at its defaults": (
        {"aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False,
                 "overlap_events": True}}, "",
    ),
    "file I/O as a tuner prints it": (
        {"aio": {"single_submit": "false", "overlap_events": "true", "intra_op_parallelism": 8, "queue_depth": 8,
                 "block_size": 1048576}}, "",
    ),
    "breakdown": ({"wall_clock_breakdown": True}, ""),
    "autotuning switched off": (
        {"autotuning": {
            "enabled": False, "results_dir": None, "exps_dir": None, "overwrite": False, "metric": "throughput",
            "start_profile_step": 3, "end_profile_step": 5, "fast": True, "max_train_batch_size": None, "mp_size": 1,
            "num_tuning_micro_batch_sizes": 3, "tuner_type": "model_based", "tuner_early_stopping": 5,
            "tuner_num_trials": 50, "arg_mappings": None}}, "",
    ),
    "autotuning": ({"autotuning": {"enabled": True, "num_nodes": None, "num_gpus": None}}, ""),
    "activation checkpointing switched off": (
        {"activation_checkpointing": {
            "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
            "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False}}, "",
    ),
    "activation checkpointing profile": ({"activation_checkpointing": {"profile": True}}, ""),
    "sparse attention": (
        {"sparse_attention": {
            "mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4,
            "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": False,
            "num_different_global_patterns": 4, "num_random_blocks": 0, "local_window_blocks": [4],
            "global_block_indices": [0], "global_block_end_indices": None, "num_sliding_window_blocks": 3}}, "",
    ),
    "data efficiency": (
        {"data_efficiency": {
            "enabled": True, "seed": 1234,
            "data_routing": {"enabled": True, "random_ltd": {
                "enabled": True, "total_layer_num": 24, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2],
                "model_mask_name": "attention_mask", "model_type": "decoder", "hidden_state_order": "seq_batch_dim",
                "random_ltd_schedule": {"min_value": 128, "max_value": 2048, "schedule_type": "fixed_linear",
                                        "schedule_config": {"require_steps": 200000, "seq_per_step": 16}}}},
            "data_sampling": {"enabled": True, "num_epochs": 1, "num_workers": 0, "curriculum_learning": {
                "enabled": True, "data_cluster_path": "/path", "curriculum_metrics": {"vocabularyrarity": {
                    "index_to_sample_path": "/path", "index_to_metric_path": "/path", "difficulty_type": "percentile",
                    "clustering_type": "schedule_based", "min_difficulty": 1, "max_difficulty": 100,
                    "schedule_type": "fixed_root", "schedule_config": {
                        "total_curriculum_step": 110000, "difficulty_step": 1, "root_degree": 2}}}}}}},
        "",
    ),
    "curriculum": (
        {"curriculum_learning": {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 40000, "difficulty_step": 8}}},
        "",
    ),
    "monitors": (
        {"tensorboard": {"enabled": True, "output_path": "output/logs/", "job_name": "train_bert"},
         "wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"},
         "comet": {"enabled": True, "workspace": "w", "project": "p", "samples_log_interval": 50,
                   "experiment_name": "e", "experiment_key": "0c4a1c4a90664f2a8084e600b19a9d7",
                   "online": False, "mode": "get"},
         "csv_monitor": {"enabled": True, "output_path": "output/logs/", "job_name": "train_bert"}}, "",
    ),
    "communication log": (
        {"comms_logger": {"enabled": True, "verbose": False, "prof_all": False, "debug": False,
                          "prof_ops": ["all_reduce", "all_gather"]}}, "",
    ),
    "elasticity": (
        {"elasticity": {
            "enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1,
            "max_gpus": 10000, "min_time": 20, "prefer_large_batch": True, "version": 0.2,
            "ignore_non_elastic_batch_info": True, "num_gpus_per_node": 8, "model_parallel_size": 1}}, "",
    ),
    "layer reduction": (
        {"compression_training": {"layer_reduction": {
            "enabled": True, "keep_number_layer": 5, "module_name_prefix": "bert.encoder.layer",
            "teacher_layer": [2, 4, 6, 8, 10], "other_module_name": ["bert.pooler", "classifier"]}}}, "",
    ),
    "weight quantisation": (
        {"compression_training": {"weight_quantization": {
            "shared_parameters": {
                "enabled": True, "quantizer_kernel": False, "schedule_offset": 0, "quantize_groups": 1,
                "quantize_verbose": False, "quantization_type": "symmetric", "rounding": "nearest",
                "quantize_weight_in_forward": False,
                "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001}},
            "different_groups": {
                "wq1": {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 50},
                        "modules": ["attention.self"]},
                "wq2": {"params": {"start_bits": 4, "target_bits": 4, "quantization_period": 50},
                        "modules": ["output"]}}}}},
        "",
    ),
    "pruning": (
        {"compression_training": {
            "activation_quantization": {
                "shared_parameters": {"enabled": True, "quantization_type": "asymmetric",
                                      "range_calibration": "dynamic", "schedule_offset": 50},
                "different_groups": {"aq1": {"params": {"bits": 8}, "modules": ["attention.output"]}}},
            "sparse_pruning": {
                "shared_parameters": {
                    "enabled": True, "schedule_offset": 30, "schedule_offset_end": 90, "schedule_offset_stride": 15,
                    "method": "snip_momentum", "block_pattern": "4x1", "dense_ratio": 0.4,
                    "excluded_modules": ["classifier"]},
                "different_groups": {}},
            "row_pruning": {
                "shared_parameters": {"enabled": True, "schedule_offset": 20, "method": "topk"},
                "different_groups": {"rp1": {"params": {"dense_ratio": 0.5}, "modules": ["intermediate.dense"],
                                             "related_modules": [["layer.\\w+.output.dense"]]}}},
            "head_pruning": {
                "shared_parameters": {"enabled": True, "schedule_offset": 10, "method": "topk", "num_heads": 12},
                "different_groups": {"rp1": {"params": {"dense_ratio": 0.5}, "modules": ["attention.output.dense"],
                                             "related_modules": [["self.query", "self.key", "self.value"]]}}},
            "channel_pruning": {
                "shared_parameters": {"enabled": True, "schedule_offset": 0, "method": "topk"},
                "different_groups": {"cp1": {"params": {"dense_ratio": 0.5}, "modules": ["layer....conv1"],
                                             "related_modules": [["layer....conv2", "layer....bn1"]]}}}}},
        "",
    ),
    "checkpoint": (
        {"checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False,
                        "parallel_write": {"pipeline_stage": False}}}, "",
    ),
    "data types": ({"data_types": {"grad_accum_dtype": "fp32"}}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_examples_are_understood(name):
    """Every key and value of the example is right; what is refused is refused for one reason: it does not exist yet."""
    example, later = EXAMPLES[name]
    if not later:
        assert load_config({**BATCH, **example}, world_size=1).root is not None
        return
    with pytest.raises(DsxConfigError) as caught:
        load_config({**BATCH, **example}, world_size=1)
    assert [(problem.kind, problem.path) for problem in caught.value.problems] == [("not-available", later)]


def test_edits_count_single_characters():
    assert edits("stage", "stage") == 0
    assert edits("stag", "stage") == edits("stagee", "stage") == edits("stafe", "stage") == edits("satge", "stage") == 1
    assert edits("", "abc") == 3
    assert edits("kitten", "sitting") == 3


def test_nearest_offers_all_that_are_equally_near_and_nothing_far():
    assert nearest("mix_gpus", ["min_gpus", "max_gpus"]) == ["max_gpus", "min_gpus"]
    assert nearest("prefetch_bucket", ["stage3_prefetch_bucket_size", "stage"]) == ["stage3_prefetch_bucket_size"]
    assert nearest("quite_another_thing", ["stage", "offload_param"]) == []
    assert nearest("Enabled", ["enabled"]) == ["enabled"]


def test_random_bytes_never_cause_anything_but_a_named_error(tmp_path):
    """Texts and base64 of noise: the reader says no by name, it does not crash."""
    random_ = random.Random(3)
    pieces = [
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "1",
        "e",
        "-",
        ".",
        "true",
        "null",
        "//",
        "/*",
        "*/",
        "#",
        "\n",
        " ",
        "\\",
        "fp16",
    ]
    file = tmp_path / "noise.json"
    for _ in range(400):
        text = "{" + "".join(random_.choice(pieces) for _ in range(random_.randrange(1, 30)))
        file.write_text(text)
        for source in (file, base64.b64encode(text.encode()).decode()):
            try:
                load_config(source, world_size=1)
            except DsxConfigError as error:
                assert error.problems


def test_a_value_asks_for_its_feature_only_when_it_differs():
    root = Root()
    assert not asks_for(root.autotuning, root.autotuning)
    assert not asks_for(root.pipeline, root.pipeline)
    assert asks_for(Root.model_validate({"autotuning": {"enabled": True}}).autotuning, root.autotuning)
    assert asks_for(Root.model_validate({"pipeline": {"stages": 2}}).pipeline, root.pipeline)


def test_a_key_is_named_by_its_owner_and_by_those_that_use_it():
    from pathlib import Path

    packages = Path(__file__).parents[2]
    sources = [file for file in packages.glob("*/src/**/*.py") if "gradient_clipping" in file.read_text("utf-8")]
    sources = [file for file in sources if file.name != "typed.py"]  # it is generated from the model of the keys
    assert 0 < len(sources) <= 6, [str(file.relative_to(packages)) for file in sources]
