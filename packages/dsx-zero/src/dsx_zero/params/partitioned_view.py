"""Views of a partitioned parameter: the results of `p[3]`, `p.data[:, 0]`, `p.t()` or `p.chunk(3)` outside a forward.

Initialisation code writes parts (`nn.init.zeros_(weight[padding_idx])`), so a view must pass such writes to its
parameter. It is a wrapper like the parameter itself, without values; its source uses the parameter's source. An index
for which torch makes a copy (`p[[0, 2]]`) gives no view here either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ZeroStateError
from .sources import ParameterSource

__all__ = ["VIEWS", "ViewSource", "find_views"]

_NAMES = (
    *("narrow", "select", "t", "transpose", "permute", "view", "view_as", "reshape", "flatten", "unflatten", "squeeze"),
    *("unsqueeze", "diagonal", "movedim", "swapaxes", "chunk", "split", "tensor_split", "unbind"),
)

VIEWS: frozenset[Callable[..., Any]] = frozenset(
    {torch.Tensor.__getitem__, torch.Tensor.T.__get__, torch.Tensor.mT.__get__}  # type: ignore[attr-defined]
    | {getattr(owner, name) for owner in (torch, torch.Tensor) for name in _NAMES if hasattr(owner, name)}
)
"""Functions whose results share memory with their first argument (some of them only for some arguments)."""

View = Callable[[torch.Tensor], torch.Tensor]


def find_views(
    func: Callable[..., Any], like: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[tuple[torch.Tensor, View]], bool] | None:
    """The views that `func` makes of a tensor with the shape of `like`.

    Returns:
        Each result on the meta device, with the function that makes it from a tensor; and whether `func` returns a
        sequence of them. None if a result is a copy.
    """
    stand = torch.empty(like.shape, dtype=like.dtype, device="meta")
    made = func(stand, *args, **kwargs)
    several = not isinstance(made, torch.Tensor)
    results = list(made) if several else [made]
    if not all(result._is_view() and result._base is stand for result in results):
        return None

    def cut(index: int) -> View:
        return lambda whole: func(whole, *args, **kwargs)[index] if several else func(whole, *args, **kwargs)

    return [(result, cut(index)) for index, result in enumerate(results)], several


class ViewSource:
    """The `ParameterSource` of a view: `view` makes it from the tensor of `base`."""

    def __init__(self, base: ParameterSource, view: View) -> None:
        self._base, self._view, self.name = base, view, base.name

    def local_shard(self) -> torch.Tensor:
        raise ZeroStateError(f"a view of parameter '{self.name}' has no shard of its own; take that of the parameter")

    def full_tensor(self) -> torch.Tensor:
        return self._view(self._base.full_tensor()).clone()

    def shard_view(self) -> None:
        """None: a view of a parameter has no name in a state dict."""
        return None

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        self._base.write(lambda whole: edit(self._view(whole)))

    def borrow(self) -> torch.Tensor | None:
        whole = self._base.borrow()
        return None if whole is None else self._view(whole)

    def read(self) -> torch.Tensor | None:
        whole = self._base.read()
        return None if whole is None else self._view(whole)

    def watch_output(self, output: Any) -> Any:
        return self._base.watch_output(output)

    def set_requires_grad(self, value: bool) -> str | None:
        return "it is a view of a parameter" if value else None

    def gradient(self) -> torch.Tensor | None:
        return None

    def set_gradient(self, value: torch.Tensor | None) -> bool:
        return value is None

    def leaf(self) -> torch.Tensor | None:
        return None

    def converted(self, dtype: torch.dtype, device: torch.device) -> None:
        return None
