"""Calls for things that the engine otherwise does automatically: reduce gradients, free memory, load weights.

Programs that drive the engine from outside (Accelerate, Lightning, RL loops) call them by DeepSpeed's names. A loop of
`engine.backward` and `engine.step` does not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .errors import EngineArgumentError, EngineError
from .model_weights import ModelWeights

if TYPE_CHECKING:
    from .parts import EngineParts


class EngineByHand:
    """A base class of `Engine` with these calls."""

    _parts: EngineParts

    def _living(self) -> EngineParts:
        raise NotImplementedError  # the engine's own

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Average the gradients that were accumulated so far over the ranks. Collective.

        `step()` does this too. Call it to look at reduced gradients before the step.

        Args:
            bucket_size: must be None; `zero_optimization.reduce_bucket_size` is used.

        Raises:
            EngineArgumentError: a bucket size is given.
            EngineError: the engine has no optimizer.
        """
        if bucket_size is not None:
            raise EngineArgumentError(
                f"allreduce_gradients(bucket_size={bucket_size}): got a size, expected None; "
                "set zero_optimization.reduce_bucket_size in the configuration"
            )
        self._with_optimizer("allreduce_gradients").reduce_gradients()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """For several backwards of one micro-batch: inside the context they only accumulate, and at its end the
        gradients are reduced once.

        Allowed in every ZeRO stage. In stages 2 and 3 the complete local gradients are kept until then. An error inside
        the context leaves the gradients unreduced and is passed on.
        """
        optimizer = self._with_optimizer("coalesce_grad_reduction")
        with self._living().window.hold():
            yield
        optimizer.reduce_gradients()

    def empty_partition_cache(self) -> None:
        """Stage 3: free every parameter that is gathered, kept for reuse or read ahead. Does nothing at other stages.

        Call it on every rank, between forwards and backwards, for example after an evaluation, or before something else
        needs the memory.
        """
        self._with_optimizer("empty_partition_cache").free_gathered()

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training states to host memory, so that other work (generation) can use the device. Every rank must call
        it, between steps.

        Args:
            include: classes of state (`dsx.zero.OffloadStateTypeEnum`); None: all.
            device: "cpu".
            pin_memory: page-locked host memory.
            non_blocking: the host does not wait for the copies.

        Raises:
            ZeroConfigError: another class of state, or another device.
        """
        self._living().shards.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False, include: Iterable[Any] | None = None) -> None:
        """Bring the states that `offload_states` moved back to the device. Every rank must call it before the next
        step.

        Args:
            non_blocking: the host does not wait for the copies.
            include: classes of state; None: all. `["lp_params"]` is enough for forwards without gradients.
        """
        self._living().shards.reload_states(non_blocking, include)

    @property
    def weights(self) -> ModelWeights:
        """Whole weights for other programs, such as a generator: in buckets, as this rank's boxes, as changes."""
        parts = self._living()
        return ModelWeights(parts.shards, parts.topology, parts.checkpointer.places)

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> Any:
        """Load full weights into the module, and into the optimizer's fp32 master weights if it has some. Every rank
        must call it.

        Args:
            state_dict: full tensors by the module's names, the same on every rank.
            strict: raise an error for names that do not fit.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead of `module.load_state_dict`.
            fetch_z3_params: gather all parameters first, for a `custom_load_fn` that writes to them; the values that
                rank 0 writes are kept.

        Returns:
            The result of `module.load_state_dict`: missing and unexpected names.
        """
        parts = self._living()
        if custom_load_fn is None:
            result = parts.module.load_state_dict(state_dict, strict=strict)
        else:
            result = self._load_by(custom_load_fn, state_dict, fetch_z3_params)
        if parts.optimizer is not None:
            parts.optimizer.refresh_fp32_params()
        return result

    def _load_by(self, load: Callable[..., Any], state_dict: Mapping[str, Any], gather: bool) -> Any:
        parts = self._living()
        if not gather:
            return load(src=state_dict, dst=parts.module)
        from dsx_zero import GatheredParameters  # lazy import: only this way needs it

        with GatheredParameters(list(parts.module.parameters()), modifier_rank=0), torch.no_grad():
            return load(src=state_dict, dst=parts.module)

    def _with_optimizer(self, call: str) -> Any:
        optimizer = self._living().optimizer
        if optimizer is None:
            raise EngineError(
                f"{call}(): this engine has no optimizer; pass one to dsx.initialize or name one in the config"
            )
        return optimizer
