"""OpenRLHF's own actor and strategy: log-probabilities, PPO's loss, sleep and wake, a push, a saved model.

`Actor`, `PolicyLoss`, `DeepspeedStrategy` and the functions around them are the package's. The trainer is not: it wants
vLLM and Ray actors on GPUs, so `train` makes its calls in its order. What the package needs a GPU for is replaced: the
padding functions of flash_attn, which are not called without packing, and `torch.cuda`'s current device.
"""

from __future__ import annotations

import argparse
import os
import sys
from types import ModuleType, SimpleNamespace

import torch
from common import RANK, WORLD, report, skip_one_update
from language_model import VOCABULARY, language_model

MICRO, ROUNDS, LENGTH, PROMPT, RATE = 2, 6, 12, 4, 5e-3


def without_a_gpu() -> None:
    """Stand-ins for what the package takes from flash_attn and from CUDA when it is imported and set up."""
    for name, contents in {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }.items():
        sys.modules[name] = ModuleType(name)
        for one in contents:
            setattr(sys.modules[name], one, None)
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args: None
    import openrlhf.utils.deepspeed.deepspeed as strategies

    make_mesh = strategies.init_device_mesh
    strategies.init_device_mesh = lambda device, *args, **kwargs: make_mesh("cpu", *args, **kwargs)


def actor_of_the_model():
    """Made from a model, since the class loads 16 bits only; what it sets when it loads one is set here."""
    from openrlhf.models import Actor

    actor = Actor(language_model())
    actor.packing_samples = False
    return actor


def settings(stage: int) -> SimpleNamespace:
    """The part of OpenRLHF's arguments that strategies read."""
    ds = SimpleNamespace(param_dtype="fp32", adam_offload=False, zero_stage=stage, tensor_parallel_size=1)
    train = SimpleNamespace(dynamic_batch_enable=False)
    return SimpleNamespace(ds=ds, train=train, local_rank=-1)


def rows(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's sequences, their mask, and one advantage for each token behind the prompt."""
    made = torch.Generator().manual_seed(100 * number + RANK)
    tokens = torch.randint(3, VOCABULARY, (MICRO, LENGTH), generator=made)
    return tokens, torch.ones_like(tokens), torch.randn(MICRO, LENGTH - PROMPT, generator=made)


def pushed(model, stage: int) -> dict[str, torch.Tensor]:
    """`_broadcast_to_vllm`: each parameter gathered alone, and sent by rank 0."""
    import deepspeed

    sent = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            assert param.numel(), name
            sent[name] = param.data.clone()
    return sent


def losses_of(actor, reference, number: int):
    """What PPO's trainer makes of one batch: old and reference log-probabilities, and the loss."""
    from openrlhf.models import PolicyLoss
    from openrlhf.models.utils import compute_approx_kl

    tokens, mask, advantages = rows(number)
    wanted = torch.ones(MICRO, LENGTH - PROMPT, dtype=torch.bool)
    with torch.no_grad():
        base = reference(tokens, wanted, mask)
        old = actor(tokens, wanted, mask)

    def loss():
        now, _ = actor(tokens, wanted, mask, return_output=True)
        found = PolicyLoss()(now, old, advantages, action_mask=wanted)[0]
        return found + 0.1 * compute_approx_kl(now, base, kl_estimator="k2").mean()

    return loss


def with_strategy(stage: int, folder: str) -> None:
    from openrlhf.utils.deepspeed import DeepspeedStrategy
    from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states, reload_deepspeed_states

    strategy = DeepspeedStrategy(
        seed=0, max_norm=1.0, micro_train_batch_size=MICRO, train_batch_size=MICRO * WORLD, zero_stage=stage,
        args=settings(stage),
    )  # fmt: skip
    strategy.setup_distributed()
    actor, optimizer, scheduler = strategy.prepare(
        (
            actor_of_the_model(),
            {
                "optim": "adam",
                "adam": {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01},
                "lr_scheduler": "constant",
                "lr_warmup_ratio": 0.0,
                "max_norm": 1.0,
                "scheduler_steps": ROUNDS,
            },
        )
    )
    reference = strategy.prepare(actor_of_the_model())
    reference.eval()
    offload_deepspeed_states(actor.model)
    curve, norms = [], []
    for number in range(ROUNDS):
        make = losses_of(actor, reference, number)  # with states asleep: parameters stay
        reload_deepspeed_states(actor.model)
        loss = make()
        strategy.backward(loss, actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
        norms.append(strategy.get_grad_norm(actor))
        offload_deepspeed_states(actor.model)
        sent = pushed(actor.model.module, stage)
        curve.append(strategy.all_reduce(loss.item()))
    strategy.save_model(actor, SimpleNamespace(save_pretrained=lambda folder: None), folder)
    finish(curve, norms, sent, folder)


def without_engine(folder: str) -> None:
    """The same rounds with torch's AdamW over the mean gradient of the ranks."""
    import torch.distributed as dist
    from openrlhf.utils.deepspeed.deepspeed_utils import get_optimizer_grouped_parameters

    dist.init_process_group("gloo")
    actor, reference = actor_of_the_model(), actor_of_the_model()
    groups = get_optimizer_grouped_parameters(actor.model, 0.01)
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    curve, norms = [], []
    for number in range(ROUNDS):
        loss = losses_of(actor, reference, number)()
        loss.backward()
        for param in actor.model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= WORLD
        norms.append(torch.nn.utils.clip_grad_norm_(actor.model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        curve.append(mean.item() / WORLD)
    sent = {name: param.data for name, param in actor.model.named_parameters()}
    if RANK == 0:
        actor.model.save_pretrained(folder)
    dist.barrier()
    finish(curve, norms, sent, folder)


def finish(curve: list[float], norms: list[float], sent: dict[str, torch.Tensor], folder: str) -> None:
    from safetensors.torch import load_file

    saved = load_file(os.path.join(folder, "model.safetensors"))
    assert set(saved) == set(sent) and all(torch.equal(saved[name], sent[name]) for name in saved)
    report(curve=curve, norms=norms, sent={name: value.double().norm().item() for name, value in sent.items()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, help="-1: without an engine")
    parser.add_argument("--folder")
    parser.add_argument("--gap", action="store_true", help="a control: one update is left out")
    args = parser.parse_args()
    without_a_gpu()
    if args.stage < 0:
        without_engine(args.folder)
        return
    if args.gap:
        skip_one_update()
    with_strategy(args.stage, args.folder)


main()
