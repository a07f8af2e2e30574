"""Adam and AdamW with moments as codes: 8 or 4 bits per moment and element, and scales per block of elements.

Codes alone would need one scale for a whole tensor. Blocks of 256 or 128 elements have scales of their own, counted
from the parameter's first element; a shard that begins at a multiple of the block has the codes of the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import TensorError
from ..spec import BITS, BLOCKS, Algorithm, Slot
from .adam import FusedAdam


class _CodedAdam(FusedAdam):
    """The common base of the two. Subclasses name their algorithm and the states that are codes."""

    elementwise = False
    row_major = True
    own_options = ("set_grad_none", "seed")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        *,
        seed: int = 0,
        split_master: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adam_w_mode,
            weight_decay=weight_decay,
            split_master=split_master,
            seed=seed,
        )

    @property
    def state_block(self) -> int:
        """Elements per scale."""
        return BLOCKS[self.algorithm]

    @property
    def state_parts(self) -> dict[str, int]:
        """States with one value for so many elements, by name."""
        return {"scale_avg": self.state_block, "scale_avg_sq": self.state_block}

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = super()._new_state(param, group)
        for name in self.state_names:
            state[name] = self._zeros(param, torch.uint8)
        for name, block in self.state_parts.items():
            state[name] = torch.zeros(-(-param.numel() // block), dtype=torch.float32, device=param.device)
        return state

    def _slot(self, param: Tensor, grad: Tensor, state: dict[str, Any], name: str) -> Slot:
        slot = super()._slot(param, grad, state, name)
        slot.scales = (state["scale_avg"], state["scale_avg_sq"])
        return slot

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a state dict of this class only: the moments of others are not in its codes."""
        for saved in state_dict["state"].values():
            if any(key not in saved for key in (*self.state_names, *self.state_parts)):
                raise TensorError(
                    f"the state dict has {', '.join(map(str, saved)) or 'nothing'}, expected {BITS[self.algorithm]}-bit"
                    f" moments ({', '.join((*self.state_names, *self.state_parts))}); load it into the optimizer that"
                    " wrote it, or start fresh"
                )
        super().load_state_dict(state_dict)


class Adam8bit(_CodedAdam):
    """Adam(W) with both moments in 8 bits: about 2 bytes of state per parameter.

    Codes are small floats relative to a scale per block of 256 elements (`scale_avg`, `scale_avg_sq` in the state: the
    EMA of the block's largest gradient, and of its square, which bound the moments), rounded stochastically and
    reproducibly (keyed by `seed`, step and element index). bf16 parameters are rounded stochastically too, so that
    updates below their last bit add up. A NaN or infinity in a gradient makes its whole block NaN, so check for
    overflow first (`dsx_ops.norm`).

    Args:
        params: parameters (float32, bfloat16, float16), or groups of them; DTensors are refused.
        lr, bias_correction, betas, eps, adam_w_mode, weight_decay: as in `FusedAdam`.
        seed: of the stochastic rounding; ranks that hold the same parameter need the same.
        split_master: as in `CPUAdam`.

    Raises:
        HyperparameterError, TensorError: as in `CPUAdam`.
    """

    algorithm = Algorithm.ADAM8
    special_dtypes = {
        "low_bits": torch.int16,
        "exp_avg": torch.uint8,
        "exp_avg_sq": torch.uint8,
        "scale_avg": torch.float32,
        "scale_avg_sq": torch.float32,
    }


class Adam4bit(_CodedAdam):
    """Adam(W) with both moments in 4 bits: 1.06 bytes of state per parameter.

    Of each byte of `moments` the high four bits are a first moment (a sign and (k/7)^2), the low four bits a second
    moment ((k+1)/16)^2, relative to a scale per block of 128 elements: the block's largest (`scale_avg`,
    `scale_avg_sq`). A step computes in fp32 and rounds what it keeps stochastically, keyed by `seed`, step and element
    index; bf16 parameters too, so that updates below their last bit add up. Roots of second moments below a sixteenth
    of the block's largest are kept as that sixteenth: such elements are stepped less than by Adam. A NaN or infinity in
    a gradient makes its whole block NaN, so check for overflow first (`dsx_ops.norm`). Torch operations on every
    device.

    Arguments and errors as `Adam8bit`.
    """

    algorithm = Algorithm.ADAM4
    state_names = ("moments",)
    special_dtypes = {
        "low_bits": torch.int16,
        "moments": torch.uint8,
        "scale_avg": torch.float32,
        "scale_avg_sq": torch.float32,
    }
