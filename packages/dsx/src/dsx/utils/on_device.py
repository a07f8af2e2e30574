"""Build a model on a chosen device and in a chosen dtype: `with OnDevice(dtype=torch.bfloat16, device="meta"): ...`.

It uses torch's own default device and default dtype, so it works for every constructor that uses these. Tensors built
with an explicit device or dtype keep it.
"""

from __future__ import annotations

import torch


class OnDevice:
    """Context manager; `enabled=False` makes it do nothing.

    Args:
        dtype: floating dtype of parameters and buffers built inside.
        device: device of tensors built inside; "meta" allocates no storage.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        if not dtype.is_floating_point:
            raise ValueError(
                f"OnDevice(dtype=...): got {dtype}, expected a floating-point dtype such as torch.bfloat16"
            )
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled
        self._entered: list[tuple[torch.device, torch.dtype]] = []

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._entered.append((self._device, torch.get_default_dtype()))
            self._device.__enter__()
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._entered:
            device, dtype = self._entered.pop()
            torch.set_default_dtype(dtype)
            device.__exit__(*exc_info)
