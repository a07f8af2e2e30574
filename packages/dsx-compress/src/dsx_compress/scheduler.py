"""`CompressionScheduler`: switches techniques on, lowers bits and makes masks, once after every optimizer step.

    scheduler = compression_scheduler(model, config)
    for batch in loader:
        ...
        optimizer.step()
        scheduler.step()

A technique with `schedule_offset` n works from the forward pass after n steps on, with 0 from the first. A step that
the optimizer skipped (overflow) must not be counted: do not call `step` then.

The state dict of the model has masks, scores and ranges; the state dict of the scheduler has the step and the bits.
With both, training resumes exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .apply import Placed, techniques_of
from .bits import period_factor
from .config import load_config
from .errors import CompressionError
from .techniques import ActivationQuantizer, SnipMask, Technique, WeightQuantizer

__all__ = ["CompressionScheduler", "compression_scheduler"]

logger = logging.getLogger("dsx_compress")


def compression_scheduler(
    model: nn.Module,
    compression_config: Any,
    *,
    gather: Callable[[list[nn.Parameter]], AbstractContextManager[Any]] | None = None,
    mean: Callable[[torch.Tensor], Any] | None = None,
) -> CompressionScheduler:
    """The scheduler of a model that `init_compression` has prepared; `compression_config` is checked to be the same.

    `gather` and `mean` are those of `CompressionScheduler`.

    Raises:
        CompressionError: the model is not compressed, or by other methods.
    """
    config = load_config(compression_config)
    there = {placed.technique.method for placed in techniques_of(model)}
    if there and there != set(config.methods()):
        raise CompressionError(
            f"compression_scheduler: the configuration has the methods {config.methods()}, the model was prepared with "
            f"{sorted(there)}; pass the configuration of init_compression"
        )
    verbose = config.weight_quantization.shared_parameters.quantize_verbose
    return CompressionScheduler(model, gather=gather, mean=mean, verbose=verbose)


class CompressionScheduler:
    """Drives all techniques of a model.

    Args:
        model: prepared by `init_compression`; it may be sharded since.
        gather: makes parameters whole for the length of a context, such as `dsx_zero.GatheredParameters` at ZeRO stage
            3; only used in steps that make a mask from weights.
        mean: averages a tensor over the data-parallel ranks in place; None with one rank. Used for the scores of
            snip_momentum and static ranges, which differ between ranks.
        verbose: log every change of bits.

    Raises:
        CompressionError: the model has no techniques.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        gather: Callable[[list[nn.Parameter]], AbstractContextManager[Any]] | None = None,
        mean: Callable[[torch.Tensor], Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self._placed = list(techniques_of(model))
        if not self._placed:
            raise CompressionError("CompressionScheduler: the model has no techniques; call init_compression first")
        self._gather = gather or (lambda parameters: nullcontext())
        self._mean, self._verbose = mean, verbose
        self.training_steps = 0
        """Steps done."""
        self._advance({})

    def step(self, eigenvalues: Mapping[str, float] | None = None) -> None:
        """Take note of an optimizer step that was applied. Collective if `gather` or `mean` is.

        Args:
            eigenvalues: relative eigenvalue, 0 to 1, of each block by the block's module name; layers elsewhere lose
                their bits as without eigenvalues.
        """
        self.training_steps += 1
        self._share()
        self._advance({name: period_factor(value) for name, value in (eigenvalues or {}).items()})

    def needs_eigenvalues(self) -> bool:
        """Whether a bit may go with the next step, so that eigenvalues matter then."""
        coming = self.training_steps + 1
        return any(t.schedule.due(coming - t.offset) for t in self._quantizers() if coming > t.offset)

    def _quantizers(self) -> Iterable[WeightQuantizer]:
        return (p.technique for p in self._placed if isinstance(p.technique, WeightQuantizer))

    def _share(self) -> None:
        """Make equal on all ranks what each has seen of its own batches."""
        if self._mean is None:
            return
        for placed in self._placed:
            technique = placed.technique
            if isinstance(technique, SnipMask) and technique.due(self.training_steps):
                self._mean(technique.pending_score())
        ranges = [
            p.technique.get_buffer("range")
            for p in self._placed
            if isinstance(p.technique, ActivationQuantizer) and p.technique.static
        ]
        if ranges:
            together = torch.cat(ranges)
            self._mean(together)
            for known, shared in zip(ranges, together.split(2)):
                known.copy_(shared)

    def _advance(self, factors: Mapping[str, int]) -> None:
        step = self.training_steps
        for placed in self._placed:
            technique = placed.technique
            before = technique.schedule.bits if isinstance(technique, WeightQuantizer) else 0
            factor = next((f for name, f in factors.items() if _inside(placed.name, name)), 1)
            if technique.needs_weight(step):
                parameters = list(placed.chain.parameters())
                with self._gather(parameters), torch.no_grad():
                    technique.advance(step, value_before(placed), factor)
            else:
                technique.advance(step, None, factor)
            if self._verbose and isinstance(technique, WeightQuantizer) and technique.schedule.bits != before:
                logger.info("step %d: %s has %d bits", step, placed.name, technique.schedule.bits)

    def state_dict(self) -> dict[str, Any]:
        """Steps, and what they alone do not tell of each technique; plain numbers, free of ranks."""
        return {
            "training_steps": self.training_steps,
            "techniques": {_key(p): p.technique.progress() for p in self._placed if p.technique.progress()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Load the model's state dict too: it has the masks.

        Raises:
            CompressionError: the state is another model's or configuration's. Nothing is changed then.
        """
        steps, saved = state.get("training_steps"), state.get("techniques")
        if type(steps) is not int or steps < 0 or not isinstance(saved, Mapping):
            raise CompressionError(f"load_state_dict: got {dict(state)!r:.200}, expected training_steps and techniques")
        own = {_key(p): p.technique for p in self._placed if p.technique.progress()}
        if set(saved) != set(own):
            raise CompressionError(
                f"load_state_dict: the saved techniques differ from the model's: {sorted(set(saved) ^ set(own))[:5]}; "
                "build the model with the configuration it was saved with"
            )
        before = {key: technique.progress() for key, technique in own.items()}
        try:
            for key, technique in own.items():
                technique.restore(saved[key])
        except (CompressionError, KeyError, TypeError, ValueError) as error:
            for key, technique in own.items():
                technique.restore(before[key])
            raise CompressionError(f"load_state_dict: {error}") from None
        self.training_steps = steps
        for placed in self._placed:
            placed.technique.enabled = steps >= placed.technique.offset


def _key(placed: Placed) -> str:
    return f"{placed.name}.{placed.tensor or 'input'}.{placed.technique.method}"


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def value_before(placed: Placed) -> torch.Tensor:
    """A layer's tensor before our techniques: the stored one, or what other parametrisations make of it."""
    chain = placed.chain
    others = [module for module in chain if not isinstance(module, Technique)]
    if hasattr(chain, "original"):
        value, rest = chain.original, others
    else:  # one parametrisation that makes the tensor of several
        originals = [getattr(chain, f"original{place}") for place in range(chain.ntensors)]
        value, rest = others[0](*originals), others[1:]
    for module in rest:
        value = module(value)
    return value.detach()
