"""verl's own engine code over `dsx.integrations.verl`: log-probabilities, steps, a push, a checkpoint, a resume.

verl's batches (nested tensors), its forward, its optimizer and schedule are the package's; the trainer is not: it wants
Ray and vLLM on GPUs, so `train` makes its calls in its order. The package is told that the device is a CPU, and with
`--sequence 2` its Ulysses attention gets a masked `scaled_dot_product_attention` in the place of flash_attn's kernel.
The same program runs in plain PyTorch (`--stage -1`); the test compares what both report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from common import RANK, WORLD, report
from language_model import VOCABULARY, configuration, language_model
from torch.nn import functional as F

MICRO, ROWS, ROUNDS, SAVED, RATE, CLIP = 2, 4, 6, 3, 5e-3, 0.5
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def tell_the_device() -> None:
    """verl knows GPUs and NPUs; its platform is a class that others register."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class CPU(PlatformCUDA):
        device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu

        def is_available(self):
            return True

        def is_platform_available(self, use_smi_check=False):
            return True

        def current_device(self):
            return "cpu"

        def device_count(self):
            return 1

        def set_device(self, device_index):
            pass

        def synchronize(self, device_index=None):
            pass

        def empty_cache(self):
            pass

        def communication_backend_name(self):
            return "gloo"

    set_platform(CPU())
    from verl.models.transformers import monkey_patch
    from verl.utils import ulysses

    ulysses.dist = WithAllToAll()
    monkey_patch.is_trl_available = lambda: False  # it patches a class that this environment's trl no longer has
    from transformers import AutoModelForTokenClassification
    from verl.workers.engine.fsdp import transformer_impl

    load, adapt = AutoModelForTokenClassification.from_pretrained, transformer_impl.get_peft_model
    AutoModelForTokenClassification.from_pretrained = staticmethod(  # critics are loaded for flash_attn
        lambda *args, **kwargs: load(*args, **{**kwargs, "attn_implementation": "sdpa"})
    )
    transformer_impl.get_peft_model = lambda *args: seeded(adapt, *args)


class WithAllToAll:
    """torch.distributed with an all-to-all of lists, which gloo does not have."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_to_all(self, outputs, inputs, group=None, async_op=False):
        assert not async_op
        sent = torch.cat([part.reshape(-1) for part in inputs])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        for output, part in zip(outputs, received.chunk(len(outputs))):
            output.copy_(part.view_as(output))


def seeded(adapt, model, config):
    """A model with adapters that begin as in the other runs."""
    torch.manual_seed(7)
    return adapt(model, config)


def packed_attention(query, key, value, attention_mask, query_length, *args, position_ids, **options):
    """What flash_attn computes of packed sequences: each token sees those before it in its own sequence."""
    of = (position_ids[0] == 0).cumsum(0)
    allowed = (of[:, None] == of[None, :]).tril()
    swapped = (x.transpose(1, 2) for x in (query, key, value))
    found = F.scaled_dot_product_attention(
        *swapped, attn_mask=allowed, scale=options.get("softmax_scale"), enable_gqa=True
    )
    return found.transpose(1, 2).contiguous()


def sequences(number: int, data_rank: int) -> list[torch.Tensor]:
    """A batch of one data-parallel rank: sequences of several lengths."""
    made = torch.Generator().manual_seed(100 * number + data_rank)
    lengths = torch.randint(6, 12, (ROWS,), generator=made).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=made) for length in lengths]


def wanted(tokens: torch.Tensor) -> torch.Tensor:
    """Which tokens count: those behind a prompt of three."""
    return (torch.arange(len(tokens)) >= 3).float()


def batch(number: int, data_rank: int, sequence: int):
    """verl's form of it."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    rows = sequences(number, data_rank)
    nested = [torch.nested.as_nested_tensor(parts, layout=torch.jagged) for parts in (
        rows, [torch.arange(len(row)) for row in rows], [wanted(row) for row in rows])]  # fmt: skip
    data = TensorDict(dict(zip(("input_ids", "position_ids", "loss_mask"), nested)), batch_size=[ROWS])
    tu.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=MICRO, use_remove_padding=sequence > 1, temperature=1.0,
        global_batch_size=ROWS * WORLD // sequence,
    )  # fmt: skip
    return data


def values_loss(model_output, data, dp_group=None):
    """A critic's regression on a function of the tokens."""
    found, tokens, mask = model_output["values"].values(), data["input_ids"].values(), data["loss_mask"].values()
    loss = ((found - tokens.float().cos()).square() * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {}


def save_model(kind: str, folder: Path) -> None:
    from transformers import LlamaForTokenClassification

    if kind != "critic":
        language_model().save_pretrained(folder)
        return
    torch.manual_seed(0)
    settings = configuration()
    settings.num_labels = 1
    LlamaForTokenClassification(settings).save_pretrained(folder)


def engine_of(kind: str, stage: int, sequence: int, offload: bool, folder: Path):
    from dsx.integrations.verl import DSXEngineConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    value = kind == "critic"
    model = HFModelConfig(
        path=str(folder), load_tokenizer=False, model_type="value_model" if value else "language_model",
        override_config={"attn_implementation": "sdpa"}, use_remove_padding=sequence > 1,
        enable_gradient_checkpointing=False, lora_rank=LORA["r"] if kind == "lora" else 0,
        lora_alpha=LORA["lora_alpha"], target_modules=LORA["target_modules"],
    )  # fmt: skip
    config = DSXEngineConfig(
        dsx={"stage": stage, "stage3_param_persistence_threshold": 0}, param_offload=offload, optimizer_offload=offload,
        mixed_precision={"param_dtype": "fp32"}, use_torch_compile=False, ulysses_sequence_parallel_size=sequence,
    )  # fmt: skip
    optimizer = FSDPOptimizerConfig(lr=RATE, clip_grad=CLIP, weight_decay=0.01, total_training_steps=ROUNDS)
    engine = EngineRegistry.new(
        model_type=model.model_type, backend="dsx", model_config=model, engine_config=config,
        optimizer_config=optimizer, checkpoint_config=None,
    )  # fmt: skip
    engine.initialize()
    if sequence > 1:
        from verl.models.transformers import monkey_patch

        monkey_patch._flash_attention_forward = packed_attention
        engine.module.config._attn_implementation = "flash_attention_2"
    return engine


def with_engine(args: argparse.Namespace, folder: Path) -> None:
    from functools import partial

    import dsx_zero
    from verl.workers.utils.losses import sft_loss

    data_rank = RANK // args.sequence
    loss_of = values_loss if args.kind == "critic" else partial(sft_loss, None)
    made = partial(engine_of, args.kind, args.stage, args.sequence, args.offload, folder)
    engine = made()
    if args.stage == 3:
        base = [p for name, p in engine.build_module().named_parameters() if "lora" not in name]
        assert all(isinstance(p, dsx_zero.PartitionedParameter) for p in base), "this rank loaded the whole model"
    curve, norms, before = [], [], []
    for number in range(ROUNDS):
        if number == SAVED:
            engine.save_checkpoint(str(args.folder), global_step=number)
        data = batch(number, data_rank, args.sequence)
        with engine.eval_mode():
            found = engine.infer_batch(data, None)["model_output"]
        scores = found["values" if args.kind == "critic" else "log_probs"]
        rows = scores.unbind() if args.kind == "critic" else [row[:-1] for row in scores.unbind()]
        before.append(mean_over_ranks(torch.cat(rows).double().mean()))
        if args.gap and number == 2:
            engine.optimizer_step = lambda: 0.0
        with engine.train_mode():
            output = engine.train_batch(batch(number, data_rank, args.sequence), loss_of)
            engine.lr_scheduler_step()
        vars(engine).pop("optimizer_step", None)
        assert bool(engine.shards.moved.away) == args.offload
        curve.append(mean_over_ranks(torch.tensor(sum(output["loss"]), dtype=torch.float64)))
        norms.append(output["metrics"].get("grad_norm"))  # of ranks that share a sequence the first one has it
    sent = {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}
    other = made()
    other.load_checkpoint(str(args.folder))
    for number in range(SAVED, ROUNDS):
        with other.train_mode():
            output = other.train_batch(batch(number, data_rank, args.sequence), loss_of)
            other.lr_scheduler_step()
        again = mean_over_ranks(torch.tensor(sum(output["loss"]), dtype=torch.float64))
        assert again == curve[number], f"resumed: got {again}, expected {curve[number]}"
    resumed = {name: value.clone() for name, value in other.get_per_tensor_param()[0]}
    assert all(torch.equal(sent[name], resumed[name]) for name in sent)
    finish(curve, norms, before, sent)


def without_engine(args: argparse.Namespace, folder: Path) -> None:
    """The same rounds with torch's AdamW over the mean gradient of the ranks, sequence by sequence."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if args.kind == "critic" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, **({"num_labels": 1} if args.kind == "critic" else {}))
    if args.kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = seeded(get_peft_model, model, LoraConfig(**LORA))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), weight_decay=0.01)
    curve, norms, before = [], [], []
    for number in range(ROUNDS):
        rows = sequences(number, RANK // args.sequence)
        tokens = torch.stack([wanted(row).sum() for row in rows]).sum()
        dist.all_reduce(tokens)
        tokens /= args.sequence
        losses, scores = zip(*(loss_of_row(model, args.kind, row) for row in rows))
        before.append(mean_over_ranks(torch.cat(scores).detach().double().mean()))
        loss = sum(losses) / tokens * (WORLD // args.sequence)
        loss.backward()
        for param in trained:
            dist.all_reduce(param.grad)
            param.grad /= WORLD
        norms.append(torch.nn.utils.clip_grad_norm_(trained, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        curve.append(mean_over_ranks(loss.detach().double()))
    if args.kind == "lora":
        model = model.merge_and_unload()
    finish(curve, norms, before, {name: param.detach() for name, param in model.named_parameters()})


def loss_of_row(model, kind: str, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the wanted tokens, and the score of each token that has one."""
    logits, mask = model(input_ids=row[None]).logits[0].float(), wanted(row)
    if kind == "critic":
        values = logits.squeeze(-1)
        return ((values - row.float().cos()).square() * mask).sum(), values
    scores = torch.log_softmax(logits, -1).gather(-1, row.roll(-1)[:, None]).squeeze(-1)
    return -(scores * mask.roll(-1)).sum(), scores[:-1]


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / WORLD


def finish(curve, norms, before, sent: dict[str, torch.Tensor]) -> None:
    sizes = {name.removeprefix("base_model.model."): v.double().norm().item() for name, v in sent.items()}
    report(curve=curve, norms=norms, before=before, sent=sizes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, help="-1: without an engine")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kind", default="actor", choices=("actor", "critic", "lora"))
    parser.add_argument("--sequence", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--gap", action="store_true", help="a control: one update is left out")
    parser.add_argument("--offload", action="store_true", help="states are in host memory between phases")
    args = parser.parse_args()
    folder = args.folder.parent / f"model-{args.kind}"
    dist.init_process_group("gloo")
    if RANK == 0:
        save_model(args.kind, folder)
    dist.barrier()
    if args.stage < 0:
        without_engine(args, folder)
    else:
        tell_the_device()
        with_engine(args, folder)


main()
