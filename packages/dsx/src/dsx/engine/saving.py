"""Full (unsharded) weights for other programs: `module_state_dict` and `save_16bit_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from dsx_core import with_code

from ..utils.logging import logger
from . import weights
from .places import differs_between_ranks

if TYPE_CHECKING:
    import torch

    from .parts import EngineParts


class WeightsMixin:
    """The part of `Engine` that gathers weights."""

    _parts: EngineParts

    def _living(self) -> EngineParts:
        raise NotImplementedError

    @overload
    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, rank0_only: Literal[False] = False
    ) -> dict[str, torch.Tensor]: ...
    @overload
    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, *, rank0_only: Literal[True]
    ) -> dict[str, torch.Tensor] | None: ...
    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, rank0_only: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Full weights and persistent buffers, as copies in host memory; every rank must call it.

        Names, order and dtypes are those of `module.state_dict()`, in every ZeRO stage. In a pipeline they are those of
        all stages, one after the other; a weight that stages share is there once.

        Args:
            exclude_frozen_parameters: leave out parameters that are not trained.
            rank0_only: other ranks keep no copies and get None.
        """
        parts = self._living()
        parts.shards.synchronize()
        keeps = parts.topology.rank == 0 or not rank0_only
        return weights.state_dict(parts.module, parts.gather, exclude_frozen=exclude_frozen_parameters, keeps=keeps)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's weights, in the dtype they are trained in, to one file; every rank must call it.

        Weights are gathered module by module, in a pipeline those of all stages. Only rank 0 keeps them and writes the
        file: as safetensors if `save_filename` ends so, otherwise in torch's own format.

        Raises:
            ValueError: experts or slices of tensors are on other ranks; `save_dir` is not a path, or `save_filename`
                has another ending than .safetensors, .bin, .pt or .pth. The same error on all ranks.
            dsx.checkpoint.CheckpointError: rank 0 cannot write the file; the same error on all ranks.

        Returns:
            True. In stage 3 with `zero_optimization.stage3_gather_16bit_weights_on_model_save` false it writes nothing
            and returns False.
        """
        parts = self._living()
        zero = parts.config.zero
        if zero.stage == 3 and zero.stage3_gather_16bit_weights_on_model_save is False:
            if parts.topology.rank == 0:
                text = (
                    "save_16bit_model wrote nothing: zero_optimization.stage3_gather_16bit_weights_on_model_save is "
                    "false; remove it, or set it to true"
                )
                logger.warning(with_code(text, "DSX551"))
            return False
        parts.shards.synchronize()
        weights.save_weights(
            save_dir,
            save_filename,
            parts.module,
            parts.gather,
            exclude_frozen=exclude_frozen_parameters,
            writer=parts.topology.rank == 0,
            elsewhere=differs_between_ranks(parts.checkpointer.places),
        )
        return True

    save_fp16_model = save_16bit_model
