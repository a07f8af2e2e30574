"""The calls that post-training frameworks make, in their order, on two ranks: transcripts, not the packages.

What is here was read in the sources (OpenRLHF's `DeepspeedStrategy` and `deepspeed_utils`, trl's `VLLMGeneration` and
`unwrap_model_for_generation`, ms-swift's `_move_model_to_vllm`, axolotl's `AxolotlGRPOTrainer`): which names are called
with which arguments, and what is expected of them. Models and generators are stand-ins: a generator is a plain copy of
the model that has `load_weights`. The oracle is the same loop in plain PyTorch, or the whole state.
"""

from __future__ import annotations

import copy
import warnings

import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

dsx_compat.activate()
WIDTH, WORDS, WORLD, ROUNDS = 16, 12, 2, 3


class Policy(nn.Module):
    """A causal model with blocks, a tied head and a norm whose weight has no decay."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.lm_head(self.norm(x))


class Adapted(nn.Module):
    """A linear layer with LoRA, with the attributes and methods of peft's layer that frameworks use."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, WIDTH, bias=False)})
        self.scaling, self.active_adapters, self.merged_adapters = {"default": 0.7}, ["default"], []
        self.disable_adapters = False

    def change(self):
        return self.lora_B["default"].weight @ self.lora_A["default"].weight * self.scaling["default"]

    def merge(self):
        self.base_layer.weight.data += self.change()
        self.merged_adapters.append("default")

    def unmerge(self):
        self.base_layer.weight.data -= self.change()
        self.merged_adapters.clear()

    def forward(self, x):
        more = self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]
        return self.base_layer(x) + more


class Generator:
    """Stands for a vLLM engine: a whole copy of the model, and what it was told to do."""

    def __init__(self, model):
        self.model, self.log, self.asleep = model, [], False
        self.parameters = dict(model.named_parameters(remove_duplicate=False))

    def load_weights(self, weights):
        assert not self.asleep, "weights were sent to a generator that sleeps"
        for name, value in weights:
            self.parameters[name].data.copy_(value)
            self.log.append(name)

    def sleep(self, level):
        self.asleep = True

    def wake_up(self, tags=None):
        self.asleep = False

    @torch.no_grad()
    def generate(self, tokens, new=3):
        for _ in range(new):
            tokens = torch.cat([tokens, self.model(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def prompts(rank, round_):
    return torch.randint(0, WORDS, (2, 3), generator=torch.Generator().manual_seed(10 * round_ + rank))


def log_probs(model, tokens):
    scores = torch.log_softmax(model(tokens[:, :-1]).float(), -1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def loss_of(model, tokens, old, reference):
    new = log_probs(model, tokens)
    reward = torch.cos(tokens[:, 1:].float())
    return -((new - old).exp() * reward).mean() + 0.1 * (new - reference).square().mean()


# - OpenRLHF: actor, critic, reference, sleep --------------------------------------------------------------------------


def openrlhf_train_config(stage):
    auto = dict.fromkeys(
        ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
         "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "reduce_bucket_size"), "auto",
    )  # fmt: skip
    zero = auto | {
        "stage": stage,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    }
    return {
        "steps_per_print": 100,
        "zero_optimization": zero | ({"reduce_scatter": True} if stage == 3 else {}),
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "data_types": {"grad_accum_dtype": None},
        "checkpoint": {"load_universal": False},
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * WORLD,
    }


def openrlhf_eval_config(stage):
    config = openrlhf_train_config(stage if stage == 3 else 0)
    config["zero_optimization"] = {"stage": stage if stage == 3 else 0, "offload_param": {"device": "none"}}
    del config["data_types"], config["checkpoint"]
    return config


def openrlhf_optimizer(model):
    from deepspeed.ops.adam import FusedAdam

    names = ["bias", "norm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(x in n for x in names)], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if any(x in n for x in names)], "weight_decay": 0.0},
    ]
    return FusedAdam(groups, lr=1e-2, betas=(0.9, 0.95))


def openrlhf_offload(engine):
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    assert hasattr(engine, "zero_optimization_stage")
    if engine.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu":
        return
    kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.contiguous_grad_buffer,
             OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_grads]  # fmt: skip
    engine.optimizer.offload_states(include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
    engine.empty_partition_cache()


def openrlhf(rank, world, stage, sleeps, folder):
    import deepspeed

    def prepare(model, optimizer=None):
        config = openrlhf_eval_config(stage) if optimizer is None else openrlhf_train_config(stage)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, args={"local_rank": -1}, dist_init_required=True
        )
        return engine

    actor, critic = (prepare(model, openrlhf_optimizer(model)) for model in (Policy(0), Policy(1)))
    reference = prepare(Policy(0))
    reference.eval()
    generator = Generator(Policy(5))
    if sleeps:
        openrlhf_offload(actor), openrlhf_offload(critic)
    losses = []
    for round_ in range(ROUNDS):
        for name, param in actor.module.named_parameters():  # broadcast_to_vllm
            with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
                generator.load_weights([(name, param.data)])
        tokens = generator.generate(prompts(rank, round_))
        with torch.no_grad():
            old, base = log_probs(actor, tokens), log_probs(reference, tokens)
            log_probs(critic, tokens)
        for engine in (actor, critic):  # one of them is awake at a time
            if sleeps:
                engine.reload_states(non_blocking=True)
            engine.train()
            loss = loss_of(engine, tokens, old, base)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if sleeps:
                openrlhf_offload(engine)
    if sleeps:
        actor.save_checkpoint(str(folder), tag="rl", client_state={"round": ROUNDS})
        openrlhf_offload(actor)
    whole = actor._consolidated_16bit_state_dict()
    if sleeps:
        actor.reload_states()
        _, client = actor.load_checkpoint(str(folder), tag="rl")
        assert client["round"] == ROUNDS
        again = actor._consolidated_16bit_state_dict()
        assert rank or all(torch.equal(again[name], whole[name]) for name in whole)
    return losses, whole, generator.log[: len(generator.log) // ROUNDS]


def plain_openrlhf():
    """Both ranks' losses of the same loop in plain PyTorch."""
    actor, critic, reference, generator = Policy(0), Policy(1), Policy(0), Generator(Policy(5))
    optimizers = [torch.optim.AdamW([
        {"params": [p for n, p in m.named_parameters() if not n.endswith("bias") and "norm" not in n]},
        {"params": [p for n, p in m.named_parameters() if n.endswith("bias") or "norm" in n], "weight_decay": 0.0},
    ], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1) for m in (actor, critic)]  # fmt: skip
    losses = [[] for _ in range(WORLD)]
    for round_ in range(ROUNDS):
        generator.load_weights(actor.named_parameters())
        tokens = [generator.generate(prompts(rank, round_)) for rank in range(WORLD)]
        with torch.no_grad():
            old, base = ([log_probs(m, t) for t in tokens] for m in (actor, reference))
        for model, optimizer in zip((actor, critic), optimizers):
            mine = [loss_of(model, t, o, b) for t, o, b in zip(tokens, old, base)]
            (sum(mine) / WORLD).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for rank, loss in enumerate(mine):
                losses[rank].append(loss.item())
    return losses, actor.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_openrlhf_with_and_without_sleep(stage, tmp_path):
    want, weights = plain_openrlhf()
    awake = run_ranks(openrlhf, WORLD, stage, False, tmp_path)
    asleep = run_ranks(openrlhf, WORLD, stage, True, tmp_path)
    for rank in range(WORLD):
        torch.testing.assert_close(torch.tensor(awake[rank][0]), torch.tensor(want[rank]), rtol=1e-5, atol=1e-6)
        assert asleep[rank][0] == awake[rank][0]
        assert asleep[rank][2] == [name for name, _ in Policy().named_parameters()]
    for name, value in awake[0][1].items():
        assert torch.equal(value, asleep[0][1][name])
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


# - trl (GRPO, server and colocated), axolotl, ms-swift: pushing weights, with and without adapters -------------------


def adapted(seed):
    model = Policy(seed).requires_grad_(False)
    for number, layer in enumerate(model.layers):
        model.layers[number] = Adapted(layer)
    torch.manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def generator_name(name):
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def trl_push(engine, send, stage, lora, groups):
    """trl gathers the whole model to merge (`groups` = 1), ms-swift some parameters at a time."""
    import contextlib

    import deepspeed

    gather = deepspeed.zero.GatheredParameters if stage == 3 else (lambda parameters: contextlib.nullcontext())
    model = engine.module
    if not lora:
        for name, parameter in model.named_parameters():
            with gather([parameter]):
                send(name, parameter.data)
        return
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    blocks = [list(model.parameters())] if groups == 1 else [list(layer.parameters()) for layer in layers]
    for number, parameters in enumerate(blocks):
        merged = layers if groups == 1 else [layers[number]]
        with gather(parameters):
            for layer in merged:
                layer.merge()
            for name, parameter in model.named_parameters():
                if "lora_" in name or (groups > 1 and not any(parameter is p for p in merged[0].parameters())):
                    continue
                send(generator_name(name), parameter.data)
            for layer in merged:
                layer.unmerge()


def grpo(rank, world, stage, lora, mode, groups):
    import deepspeed

    model = adapted(0) if lora else Policy(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    plain = copy.deepcopy(Policy(0))
    generator = Generator(plain)
    generator.sleep(level=2)
    losses = []
    for round_ in range(ROUNDS):
        generator.wake_up(tags=["weights"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "GatheredParameters: changed", dsx_compat.CompatWarning)

            def send(name, value):
                if mode == "colocate" or rank == 0:  # the main process talks to the server
                    generator.load_weights([(name, value)])

            trl_push(engine, send, stage, lora, groups)
        if mode == "server":  # all ranks get the server's answer
            both = [generator.generate(prompts(r, round_)) for r in range(world)] if rank == 0 else None
            answer = [both]
            torch.distributed.broadcast_object_list(answer, src=0)
            tokens = answer[0][rank]
        else:
            tokens = generator.generate(prompts(rank, round_))
        generator.sleep(level=2)
        with torch.no_grad():
            old = log_probs(engine, tokens)
        loss = loss_of(engine, tokens, old, old)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, sorted(set(generator.log))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("lora", "mode", "groups"),
    [(False, "colocate", 1), (False, "server", 1), (True, "colocate", 1), (True, "colocate", 2)],
    ids=["trl-colocate", "trl-server", "trl-axolotl-lora", "ms-swift-lora"],
)
def test_pushes_of_grpo_give_the_losses_of_stage_0(stage, lora, mode, groups):
    first = run_ranks(grpo, WORLD, 0, lora, mode, groups)
    found = run_ranks(grpo, WORLD, stage, lora, mode, groups)
    for (losses, names), (want, _) in zip(found, first):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-5, atol=1e-6)
        assert mode == "server" or groups > 1 or names == sorted(name for name, _ in Policy().named_parameters())


def unowned(rank, world):
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=Policy(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW"},
        },
    )
    weight = engine.module.layers[0].weight
    before = engine.module_state_dict()["layers.0.weight"]
    with pytest.warns(dsx_compat.CompatWarning, match=r"layers.0.weight.*DeepSpeed drops such changes"):
        with deepspeed.zero.GatheredParameters(weight):
            weight.data.zero_()
    assert torch.equal(engine.module_state_dict()["layers.0.weight"], before)


def test_a_change_without_an_owner_is_undone_and_warned_of():
    run_ranks(unowned, WORLD)
