"""`CompressionScheduler`: switches techniques on, lowers bits and makes masks, once after every optimizer step.

    scheduler = compression_scheduler(model, config)
    for batch in loader:
        ...
        optimizer.step()
        scheduler.step()

A technique with `schedule_offset` n is on from the forward pass after n steps; with 0 it is on from the first one. Do
not call `step` after a step that the optimizer skipped (overflow): it must not be counted.

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
from .snip import SnipMask
from .techniques import ActivationQuantizer, Technique, WeightQuantizer

__all__ = ["CompressionScheduler", "compression_scheduler"]

logger = logging.getLogger("dsx_compress")


def compression_scheduler(
    model: nn.Module,
    compression_config: Any,
    *,
    gather: Callable[[list[nn.Parameter]], AbstractContextManager[Any]] | None = None,
    mean: Callable[[torch.Tensor], Any] | None = None,
    loss_scale: Callable[[], float] | None = None,
) -> CompressionScheduler:
    """Make the scheduler of a model that `init_compression` has prepared.

    Args:
        compression_config: the configuration of `init_compression`; its methods must be those of the model.
        gather, mean, loss_scale: see `CompressionScheduler`.

    Raises:
        CompressionError: the model has no techniques, or those of other methods.
    """
    config = load_config(compression_config)
    found = {placed.technique.method for placed in techniques_of(model)}
    if found and found != set(config.methods()):
        raise CompressionError(
            f"compression_scheduler: the configuration has the methods {config.methods()}, the model was prepared with "
            f"{sorted(found)}; pass the configuration of init_compression"
        )
    verbose = config.weight_quantization.shared_parameters.quantize_verbose
    return CompressionScheduler(model, gather=gather, mean=mean, loss_scale=loss_scale, verbose=verbose)


class CompressionScheduler:
    """Switches techniques on and advances them, for all techniques of a model.

    Args:
        model: prepared by `init_compression`. It may have been sharded after that.
        gather: a context manager in which all elements of the given parameters are in memory, such as
            `dsx_zero.GatheredParameters` at ZeRO stage 3. It is used only in steps that make a mask from weights.
        mean: averages a tensor over the data-parallel ranks, in place; None: there is one rank. It is used for the
            scores of snip_momentum and for static ranges, which differ between ranks.
        loss_scale: the scale that losses have now, such as `GradScaler.get_scale`; None: they have none. The scores of
            snip_momentum are divided by it: otherwise a step at twice the scale would count twice.
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
        loss_scale: Callable[[], float] | None = None,
        verbose: bool = False,
    ) -> None:
        self._placed = list(techniques_of(model))
        if not self._placed:
            raise CompressionError("CompressionScheduler: the model has no techniques; call init_compression first")
        self._gather = gather or (lambda parameters: nullcontext())
        self._mean, self._verbose = mean, verbose
        self.training_steps = 0
        """Optimizer steps so far."""
        for technique in (placed.technique for placed in self._placed):
            if loss_scale is not None and isinstance(technique, SnipMask):
                technique.loss_scale = loss_scale
        self._advance({})

    def step(self, eigenvalues: Mapping[str, float] | None = None) -> None:
        """Count an optimizer step that was applied, and make the changes that are due.

        Collective if `gather` or `mean` is.

        Args:
            eigenvalues: relative eigenvalue, 0 to 1, of each block, by the block's module name. Layers outside of these
                blocks lose their bits as without eigenvalues.
        """
        self.training_steps += 1
        self._average_over_ranks()
        self._advance({name: period_factor(value) for name, value in (eigenvalues or {}).items()})

    def needs_eigenvalues(self) -> bool:
        """Whether the next step may remove a bit, so that it needs eigenvalues."""
        coming = self.training_steps + 1
        return any(t.schedule.due(coming - t.offset) for t in self._quantizers() if coming > t.offset)

    def _quantizers(self) -> Iterable[WeightQuantizer]:
        return (p.technique for p in self._placed if isinstance(p.technique, WeightQuantizer))

    def _average_over_ranks(self) -> None:
        """Average over the ranks the scores and ranges that each rank computed from its own batches."""
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
            factor = next((f for name, f in factors.items() if _is_inside(placed.name, name)), 1)
            if technique.needs_weight(step):
                parameters = list(placed.chain.parameters())
                with self._gather(parameters), torch.no_grad():
                    technique.advance(step, value_before(placed), factor)
            else:
                technique.advance(step, None, factor)
            if self._verbose and isinstance(technique, WeightQuantizer) and technique.schedule.bits != before:
                logger.info("step %d: %s has %d bits", step, placed.name, technique.schedule.bits)

    def state_dict(self) -> dict[str, Any]:
        """The steps, and of each technique the state that does not follow from them.

        These are plain numbers, which do not depend on the number of ranks.
        """
        return {
            "training_steps": self.training_steps,
            "techniques": {_key(p): p.technique.progress() for p in self._placed if p.technique.progress()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Load the model's state dict too: it has the masks.

        Raises:
            CompressionError: the state belongs to another model or configuration. Nothing is changed then.
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


def _is_inside(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def value_before(placed: Placed) -> torch.Tensor:
    """A layer's tensor without our techniques: the stored tensor, with all other parametrisations applied."""
    chain = placed.chain
    others = [module for module in chain if not isinstance(module, Technique)]
    if hasattr(chain, "original"):
        value, rest = chain.original, others
    else:  # the first parametrisation computes the tensor from several stored ones
        originals = [getattr(chain, f"original{place}") for place in range(chain.ntensors)]
        value, rest = others[0](*originals), others[1:]
    for module in rest:
        value = module(value)
    return value.detach()
