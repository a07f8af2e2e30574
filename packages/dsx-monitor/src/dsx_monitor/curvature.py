"""The largest eigenvalue of the loss's Hessian in each block of a model, by power iteration.

    eigenvalue = Eigenvalue(layer_name="encoder.layer", layer_num=12)
    relative = eigenvalue.compute_from_loss(loss, model)          # before loss.backward()

For a block with parameters p and gradient g(p), a random unit vector v is multiplied by the Hessian again and again,
Hv = d(g . v)/dp, and normalised each time. v . Hv converges to the eigenvalue of largest magnitude (von Mises). The
result is relative, |value| / largest |value| of all blocks, because schedules of quantisation and layer drop use that;
the plain values are in `latest`. Fused attention cannot be differentiated twice, so the forward pass must run under
`double_backward()`.

Left out: parameters that are partitioned between uses. Gather them first, as `dsx` does at ZeRO stage 3
(`dsx_zero.GatheredParameters`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["CurvatureError", "Eigenvalue", "double_backward"]

logger = logging.getLogger("dsx_monitor")

Tensors = Sequence[torch.Tensor]


class CurvatureError(RuntimeError):
    """The eigenvalues cannot be computed: no such blocks, or gradients without a graph."""


@contextmanager
def double_backward() -> Iterator[None]:
    """Inside the context attention runs with operators that can be differentiated twice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


class Eigenvalue:
    """Power iteration over the blocks of a model.

    Args:
        verbose: log each block's iterations.
        max_iter: largest number of iterations.
        tol: iterations end when the relative change of the value is below this.
        stability: added to norms before dividing.
        gas_boundary_resolution: accumulation boundaries between two computations; for the caller, which decides when to
            compute.
        layer_name: attribute path of the container of the blocks.
        layer_num: how many of its children are blocks.
        seed: the seed of the start vectors, so that all ranks use the same vectors.

    Raises:
        CurvatureError: no layer_name, or no blocks.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0.0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
        *,
        seed: int = 0,
    ) -> None:
        if not layer_name or layer_num < 1:
            raise CurvatureError(
                f"Eigenvalue: got layer_name={layer_name!r}, layer_num={layer_num}, expected the path of the "
                "container of the blocks, such as 'bert.encoder.layer', and how many there are"
            )
        self.verbose, self.max_iter, self.tol, self.stability = verbose, max_iter, tol, stability
        self.gas_boundary_resolution = gas_boundary_resolution
        self.layer_name, self.layer_num, self._seed = layer_name, layer_num, seed
        self.latest: list[float] = []
        """The blocks' eigenvalues of the last computation, with sign and scale."""

    def blocks(self, module: nn.Module) -> list[list[nn.Parameter]]:
        """The trainable parameters of each block.

        Raises:
            CurvatureError: there is no such container, it has fewer children, or a block has no trainable parameter.
        """
        try:
            container = module.get_submodule(self.layer_name)
        except AttributeError:
            containers = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
            raise CurvatureError(
                f"Eigenvalue: the model has no module {self.layer_name!r}; its lists of modules are "
                f"{containers or 'none'}; name one of them in layer_name"
            ) from None
        children = list(container.children())
        if len(children) < self.layer_num:
            raise CurvatureError(
                f"Eigenvalue: got layer_num={self.layer_num}, but {self.layer_name} has {len(children)} children; "
                f"expected at most that many"
            )
        found = [[p for p in child.parameters() if p.requires_grad] for child in children[: self.layer_num]]
        for place, parameters in enumerate(found):
            if not parameters:
                raise CurvatureError(f"Eigenvalue: {self.layer_name}.{place} has no parameter that is trained")
        return found

    def compute_eigenvalue(self, module: nn.Module, device: Any = None, scale: float = 1.0) -> list[float]:
        """Compute the eigenvalues from the gradients that `backward(create_graph=True)` has left in `.grad`.

        Args:
            module: the model.
            device: ignored; everything stays where the parameters are.
            scale: the loss scale that the gradients contain; the values are divided by it.

        Returns:
            |value| / largest |value| for each block; 1 for blocks without curvature.

        Raises:
            CurvatureError: a gradient is missing or has no graph, or `scale` is not a positive number.
        """
        if not 0 < scale < math.inf:
            raise CurvatureError(f"Eigenvalue: got scale={scale}, expected the loss scale, a positive number")
        blocks = self.blocks(module)
        for place, parameters in enumerate(blocks):
            if any(p.grad is None or p.grad.grad_fn is None for p in parameters):
                raise CurvatureError(
                    f"Eigenvalue: gradients of {self.layer_name}.{place} have no graph; call "
                    "loss.backward(create_graph=True) first, or use compute_from_loss"
                )
        gradients = [[p.grad for p in parameters if p.grad is not None] for parameters in blocks]
        return self._relative([self._value(i, g, p, None) / scale for i, (g, p) in enumerate(zip(gradients, blocks))])

    def compute_from_loss(
        self, loss: torch.Tensor, module: nn.Module, mean: Callable[[torch.Tensor], Any] | None = None
    ) -> list[float]:
        """Compute the eigenvalues from a loss before its backward; the backward can be done afterwards.

        Args:
            loss: a single number.
            module: the model.
            mean: averages a 1-D tensor over the ranks in place, to get the curvature of the mean loss of all ranks.

        Returns:
            The same as `compute_eigenvalue`.

        Raises:
            CurvatureError: the loss does not reach a block, or an operator cannot be differentiated twice.
        """
        blocks = self.blocks(module)
        values = []
        for place, parameters in enumerate(blocks):
            try:
                gradients = torch.autograd.grad(loss, parameters, create_graph=True)
                values.append(self._value(place, gradients, parameters, mean))
            except RuntimeError as error:
                raise CurvatureError(
                    f"Eigenvalue: {self.layer_name}.{place} cannot be differentiated twice: {error}; run the "
                    "forward pass under dsx_monitor.curvature.double_backward()"
                ) from error
        return self._relative(values)

    def _value(self, place: int, gradients: Tensors, parameters: Tensors, mean: Any) -> float:
        """The eigenvalue of largest magnitude of one block."""
        generator = torch.Generator().manual_seed(self._seed + place)
        numel = sum(p.numel() for p in parameters)
        v = torch.randn(numel, generator=generator, device="cpu").to(parameters[0].device)
        v = self._normalised(v)
        value, before, iterations = 1.0, 0.0, 0
        while iterations < self.max_iter and value != 0.0 and abs((value - before) / value) >= self.tol:
            product = _hessian_vector(gradients, parameters, v)
            if mean is not None:
                mean(product)
            product = torch.nan_to_num(product, nan=0.0, posinf=0.0, neginf=0.0)
            before, value = value, float(product @ v)
            v = self._normalised(product)
            iterations += 1
        if self.verbose:
            logger.info("eigenvalue of %s.%d: %.6g after %d iterations", self.layer_name, place, value, iterations)
        return value

    def _normalised(self, v: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(v / (v.norm() + self.stability), nan=0.0, posinf=0.0, neginf=0.0)

    def _relative(self, values: list[float]) -> list[float]:
        self.latest = values
        largest = max(map(abs, values))
        return [abs(value) / largest if value else 1.0 for value in values]


def _hessian_vector(gradients: Tensors, parameters: Tensors, v: torch.Tensor) -> torch.Tensor:
    """H v as a 1-D fp32 tensor; `v` is also 1-D and fp32."""
    parts = [
        part.view_as(p).to(p.dtype)
        for part, p in zip(v.split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    products = torch.autograd.grad(gradients, parameters, grad_outputs=parts, retain_graph=True, allow_unused=True)
    filled = [torch.zeros_like(p) if h is None else h for h, p in zip(products, parameters, strict=True)]
    return torch.cat([h.detach().reshape(-1).float() for h in filled])
