"""A small Llama in torchtitan's own Trainer: FSDP2 on two devices, accumulation, clipping and a warm-up.

torchtitan wants a CUDA device, so `other_systems.py` starts it on the simulated one. What is ours is the data: 12
tokens per sample, of which a number that differs has no label. Version 0.3.0 was written for a nightly build of torch;
what it lacks in torch 2.13 is one function (`set_timeout`), which is given here.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from dsx_verify import Expected, Receipt, audit_loop
from torch.distributed import distributed_c10d
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

__all__ = ["audited"]

WORDS, LENGTH, WIDTH, HEADS = 61, 12, 32, 4
ACCUMULATION, CLIP, RATE, WARMUP = 3, 0.5, 1e-2, 2


class Tokenizer(BaseTokenizer):
    """None is needed: the data are numbers."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """See `Tokenizer`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Nothing is encoded."""
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        """Nothing is decoded."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """The number of words."""
        return WORDS


class Loader(BaseDataLoader):
    """Random tokens, other ones on each rank."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """See `Loader`."""

    def __init__(self, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self.rank, self.shape = dp_rank, (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self.shape[1] - 1).repeat(self.shape[0], 1)
        number = 0
        while True:
            generator = torch.Generator().manual_seed(1000 * number + self.rank)
            tokens = torch.randint(0, WORDS, self.shape, generator=generator)
            labels = tokens[:, 1:].clone()
            labels[:, : (2 * number + self.rank) % 5] = IGNORE_INDEX
            number += 1
            yield {"input": tokens[:, :-1], "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """No state: nothing is resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`."""


def small_llama() -> Any:
    """Two layers. The attention is torch's: torchtitan's own choices are kernels for a GPU."""
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=64, theta=10000)
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": HEADS, "hidden_dim": 48}
    layers = llama3._build_llama3_layers(**sizes, rope=rope, attn_backend="flex")
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    embedding = {"num_embeddings": WORDS, "embedding_dim": WIDTH, "param_init": llama3._EMBEDDING_INIT}
    head = {"in_features": WIDTH, "out_features": WORDS, "param_init": llama3._output_linear_init(WIDTH)}
    return llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(**embedding),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(**head),
        layers=layers,
    )


def trainer_of(steps: int) -> Trainer:
    """A trainer on the ranks that run."""
    spec = ModelSpec(
        name="llama3",
        flavor="small",
        model=small_llama(),
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    batch = {"local_batch_size": 2, "global_batch_size": 2 * ACCUMULATION * int(os.environ["WORLD_SIZE"])}
    training = TrainingConfig(
        **batch,
        seq_len=LENGTH,
        steps=steps,
        max_norm=CLIP,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=RATE),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=WARMUP),
        training=training,
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1, spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        dump_folder=tempfile.mkdtemp(),
    )
    torch.manual_seed(0)
    return config.build()


class MeanOfMeans:
    """A mistake that many loops made: each micro-batch is divided by its own tokens, not by those of the update."""

    def __init__(self, trainer: Trainer) -> None:
        self.right = trainer.forward_backward_step

    def __call__(self, *, input_dict: Any, labels: torch.Tensor, global_valid_tokens: torch.Tensor) -> torch.Tensor:
        own = (labels != IGNORE_INDEX).sum() * ACCUMULATION * dist.get_world_size()
        return self.right(input_dict=input_dict, labels=labels, global_valid_tokens=own)


def audited(wrong: bool) -> Receipt:
    """`train()` of torchtitan's Trainer for four updates."""
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = distributed_c10d._set_pg_timeout  # the same function under its older name
    trainer = trainer_of(steps=4)
    if wrong:
        trainer.forward_backward_step = MeanOfMeans(trainer)

    def make() -> torch.nn.Module:
        model = trainer.model_config.build()
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        return model

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        logits = model(inputs["input"], positions=inputs["positions"])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)

    (group,) = next(iter(trainer.optimizers)).param_groups
    settings = {name: group[name] for name in ("betas", "eps", "weight_decay")}
    (schedule,) = trainer.lr_schedulers.schedulers
    expected = Expected(
        make,
        lambda parameters: torch.optim.AdamW(parameters, lr=RATE, **settings),
        loss=loss,
        weight=lambda batch: float((batch[1] != IGNORE_INDEX).sum()),
        accumulation=ACCUMULATION,
        max_norm=CLIP,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.lr_lambdas[0]),
    )
    return audit_loop(trainer.train, trainer, expected=expected, raise_error=False)
