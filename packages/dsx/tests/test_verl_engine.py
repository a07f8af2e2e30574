"""The engine for verl, on two ranks, over a transcript of verl's interface (0.9.1): not over verl itself.

`stand_in` has the names that the engine imports, with the signatures and the order of calls read in verl's sources
(`workers/engine/{base,spec,utils}.py`). What verl's FSDP engine makes of a batch is replaced by a model of token
scores.
"""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks
from torch import nn

WORDS, WIDTH = 11, 12


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.log_softmax(self.head(x), -1)


def loss_of(model, batch, tokens_of_all, data_ranks):
    scores = model(batch["input_ids"][:, :-1]).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return -(scores * batch["loss_mask"][:, 1:]).sum() / tokens_of_all * data_ranks, scores


class Batch(dict):
    """Stands for a TensorDict."""

    def contiguous(self):
        return self


class EngineConfig:
    """verl's is a dataclass; the engine's own, which inherits, is one here, too."""

    param_offload = optimizer_offload = forward_only = False

    def __post_init__(self):
        assert self.strategy


class FSDPEngineConfig(EngineConfig):
    mixed_precision = None

    def __post_init__(self):
        super().__post_init__()
        assert self.strategy in ["fsdp", "fsdp2", "fsdp_turbo"]


@dataclass
class ShardSpec:
    full_shape: tuple
    mesh: Any = None
    placements: Any = None
    place: Any = None
    gather_group: Any = None
    contributes: bool = True


class BaseEngine:
    def train_batch(self, data, loss_function):
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = norm
        return outputs

    def infer_batch(self, data, loss_function=None):
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)


class BaseEngineCtx:
    def __init__(self, engine, mode, **options):
        self.engine, self.mode = engine, mode
        self.disable_auto_offload = options.pop("disable_auto_offload", False)
        self.zero_grad_on_exit = options.pop("zero_grad_on_exit", True)

    def _switch(self, device, leaving):
        if self.disable_auto_offload:
            return
        model = self.engine.is_param_offload_enabled if leaving else True
        optimizer = self.engine.is_optimizer_offload_enabled if leaving else True
        if self.mode == "eval":
            self.engine.to(device=device, model=model, optimizer=False, grad=False)
        else:
            self.engine.to(device=device, model=model, optimizer=optimizer, grad=model)

    def __enter__(self):
        self._switch("cuda", leaving=False)  # verl's get_device_name() of a machine without a device, too
        self.engine.mode = self.mode

    def __exit__(self, kind, value, trace):
        self._switch("cpu", leaving=True)
        self.engine.mode = None


class EngineRegistry:
    engines: dict = {}

    @classmethod
    def register(cls, model_type, backend, device="cuda"):
        def keep(engine):
            for name in backend:
                for one in device:
                    cls.engines[model_type, name, one] = engine
            return engine

        return keep


class FSDPEngineWithLMHead(BaseEngine):
    """What the engine inherits: what it keeps, how a batch is computed, and how model and schedule are built."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode, self.rank, self._is_lora = None, dist.get_rank(), model_config.lora_rank > 0
        self._init_device_mesh()

    def _build_module(self):
        return Policy()

    def _build_lr_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    def forward_step(self, micro_batch, loss_function, forward_only):
        loss, scores = loss_of(self.module, micro_batch, micro_batch["batch_num_tokens"], micro_batch["dp_size"])
        return loss, {"model_output": {"log_probs": scores.detach()}, "loss": loss.item(), "metrics": {}}


class Ulysses:
    """verl's attention asks here for the ranks with which it exchanges heads."""

    group = None

    @classmethod
    def get_ulysses_sequence_parallel_group(cls):
        return cls.group

    @classmethod
    def set_ulysses_sequence_parallel_group(cls, group):
        cls.group = group


def prepare_micro_batches(data, dp_group=None, same_micro_num_in_dp=True):
    rest = {key: value for key, value in data.items() if not isinstance(value, torch.Tensor)}
    rows = zip(data["input_ids"].split(data["micro"]), data["loss_mask"].split(data["micro"]))
    return [Batch(rest, input_ids=i, loss_mask=m) for i, m in rows], None


def postprocess_batch_func(output_lst, indices, data):
    return {
        "model_output": {"log_probs": torch.cat([o["model_output"]["log_probs"] for o in output_lst])}
        if "model_output" in output_lst[0]
        else {},
        "loss": [one["loss"] for one in output_lst],
        "metrics": {},
    }


@contextmanager
def stand_in():
    """`verl`'s modules, as far as the engine imports them."""
    made = {
        "verl": {},
        "verl.utils.device": {"get_device_name": lambda: "cuda"},
        "verl.utils.torch_dtypes": {"PrecisionType": SimpleNamespace(to_dtype={"bf16": torch.bfloat16}.get)},
        "verl.workers.config.engine": {"EngineConfig": EngineConfig, "FSDPEngineConfig": FSDPEngineConfig},
        "verl.utils": {
            "tensordict_utils": SimpleNamespace(
                assign_non_tensor=lambda data, **more: data.update(more),
                get_non_tensor_data=lambda data, key, default: data.get(key, default),
            ),
            "ulysses": Ulysses,
        },
        "verl.workers": {},
        "verl.workers.config": {},
        "verl.workers.config.optimizer": {
            "build_optimizer": lambda members, config: torch.optim.AdamW(members, lr=config.lr)
        },
        "verl.workers.engine": {},
        "verl.workers.engine.base": {
            "BaseEngine": BaseEngine, "BaseEngineCtx": BaseEngineCtx, "EngineRegistry": EngineRegistry
        },
        "verl.workers.engine.fsdp": {},
        "verl.workers.engine.fsdp.transformer_impl": {
            "FSDPEngineWithLMHead": FSDPEngineWithLMHead,
            "FSDPEngineWithValueHead": type("FSDPEngineWithValueHead", (FSDPEngineWithLMHead,), {}),
        },
        "verl.workers.engine.spec": {"ShardSpec": ShardSpec},
        "verl.workers.engine.utils": {
            "prepare_micro_batches": prepare_micro_batches, "postprocess_batch_func": postprocess_batch_func
        },
    }  # fmt: skip
    for name, members in made.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    try:
        yield
    finally:
        for name in (*made, "dsx.integrations.verl"):
            sys.modules.pop(name, None)


def data(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    mask = (torch.rand(4, 6, generator=generator) < 0.7).float()
    return Batch(input_ids=torch.randint(0, WORDS, (4, 6), generator=generator), loss_mask=mask, micro=2)


def played(rank, world, stage, offload, folder):
    with stand_in():
        import dsx.integrations.verl

        kind = EngineRegistry.engines["language_model", "dsx", "cpu"]
        assert kind is dsx.integrations.verl.DSXEngineWithLMHead
        return play(kind, rank, world, stage, offload, folder)


def play(kind, rank, world, stage, offload, folder):
    def made():
        make_config = sys.modules[kind.__module__].DSXEngineConfig
        config = make_config(dsx={"stage": stage, "stage3_param_persistence_threshold": 0})
        config.param_offload = config.optimizer_offload = offload
        engine = kind(SimpleNamespace(lora_rank=0), config, SimpleNamespace(lr=1e-2, clip_grad=0.5), None)
        engine.initialize()
        return engine

    engine = made()
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (rank, world)
    assert bool(engine.shards.moved.away) == offload
    weights = {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}  # while it sleeps
    engine.prime_delta_snapshots()
    found = []
    for step in range(3):
        with engine.eval_mode():
            assert not offload or set(engine.shards.moved.away) >= {"optim_states"}
            scores = engine.infer_batch(data(rank, step))["model_output"]["log_probs"]
        with engine.train_mode():
            output = engine.train_batch(data(rank, step), None)
            rate = engine.lr_scheduler_step()
        found.append((sum(output["loss"]), output["metrics"]["grad_norm"], rate, scores))
        assert bool(engine.shards.moved.away) == offload
        receive(engine, weights)
        whole = dict(engine.get_per_tensor_param()[0])
        assert all(torch.equal(weights[name], value) for name, value in whole.items())
    check_shards(engine, weights)
    engine.save_checkpoint(str(folder), global_step=3)
    other = made()
    other.load_checkpoint(str(folder))
    assert bool(other.shards.moved.away) == offload
    again = {name: value.clone() for name, value in other.get_per_tensor_param()[0]}
    assert all(torch.equal(weights[name], value) for name, value in again.items())
    assert other.lr_scheduler.get_last_lr() == engine.lr_scheduler.get_last_lr()
    with pytest.raises(ValueError, match="expected 'cpu'"):
        engine.to("xpu")
    return found, weights


def receive(engine, weights):
    """The consumer of deltas: all ranks go through the entries together, gather counts, positions and values."""
    entries, _ = engine.get_per_tensor_param_delta_shard()
    for slots, dtype, counts, positions, values, group in entries:
        ((name, shape),) = slots
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (name, counts, positions, values), group=group)
        assert {one[0] for one in everyone} == {name} and dtype == "float32"
        for _, (count,), at, new in everyone:
            assert count == len(at) == len(new)
            weights[name].view(-1)[at] = new
            assert tuple(weights[name].shape) == shape


def check_shards(engine, weights):
    """Ranges of all ranks are the tensors."""
    entries, peft = engine.get_per_tensor_param_shard()
    assert peft is None
    for name, values, spec in entries:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (spec.place, values, spec.contributes), group=spec.gather_group)
        parts = [part for _, part, contributes in sorted(everyone, key=lambda e: e[0]) if contributes]
        assert torch.equal(torch.cat(parts).view(spec.full_shape), weights[name])


def plain(world):
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = [[] for _ in range(world)]
    for step in range(3):
        batches = [data(rank, step) for rank in range(world)]
        tokens = sum(batch["loss_mask"].sum() for batch in batches)
        before = [loss_of(model, batch, tokens, world)[1].detach() for batch in batches]
        losses = [loss_of(model, batch, tokens, world)[0] for batch in batches]
        (sum(losses) / world).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        rate = optimizer.param_groups[0]["lr"] = 1e-2 / (step + 2)
        for rank in range(world):
            found[rank].append((losses[rank].item(), norm.item(), rate, before[rank]))
    return found, model.state_dict()


@pytest.mark.parametrize(("stage", "offload"), [(3, True), (2, True), (3, False)])
def test_verls_calls_train_as_plain_torch_and_export_the_weights(stage, offload, tmp_path):
    want, weights = plain(2)
    found = run_ranks(played, 2, stage, offload, tmp_path)
    for rank, (steps, got) in enumerate(found):
        for one, other in zip(steps, want[rank], strict=True):
            torch.testing.assert_close(torch.tensor(one[:3]), torch.tensor(other[:3]), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(one[3], other[3], rtol=1e-5, atol=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def in_groups(rank, world):
    with stand_in():
        import dsx.integrations.verl

        config = dsx.integrations.verl.DSXEngineConfig()
        config.ulysses_sequence_parallel_size = world
        kind = EngineRegistry.engines["language_model", "dsx", "cpu"]
        engine = kind(SimpleNamespace(lora_rank=0), config, SimpleNamespace(lr=1e-2, clip_grad=0.5), None)
        engine.initialize()
        assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (0, 1)
        assert engine.is_mp_src_rank_with_outputs() == (rank == 0)
        for enter in (engine.train_mode, engine.eval_mode):
            with enter():
                assert dist.get_process_group_ranks(Ulysses.group) == list(range(world))
            assert Ulysses.group is None
        norms = []
        for keep in (True, False):
            with engine.train_mode(zero_grad_on_exit=not keep):
                batch = Batch(data(0, 0), return_model_output=keep)
                output = engine.forward_backward_batch(batch, None)
            assert ("log_probs" in output["model_output"]) == keep
            with engine.train_mode():
                norms.append(engine.optimizer_step())
        return norms


def test_a_mode_tells_verls_attention_its_ranks_and_keeps_gradients_if_asked():
    for kept, left in run_ranks(in_groups, 2):
        assert kept > 0 and left == 0
