"""Knowledge distillation: a loss that makes a student similar to its teacher, and a teacher that uses little memory.

    teacher = Teacher(big_model, bits=8)
    distillation = DistillationLoss(student, teacher, temperature=2.0, alpha=0.5, hidden={"layers.0": "layers.1"})
    logits = student(x)
    loss = distillation(logits, task_loss, (x,))

    loss = (1 - alpha) task + alpha T^2 KL(teacher / T || student / T)
         + beta sum of MSE(hidden) + gamma sum of MSE(attention)

(Hinton et al. 2015; hidden states and attention as in TinyBERT, Jiao et al. 2020). Outputs of modules are read by
forward hooks, so it works with any model, also a sharded one. `stop_step` ends distillation before training ends. This
is the staged distillation of Mixture-of-Students: a small student gets worse if it imitates the teacher to the last
step (Rajbhandari et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .errors import CompressionError, near
from .export import pack_dense
from .layers import kind_of, recursive_setattr
from .runtime import QuantizedLinear

__all__ = ["DistillationLoss", "Teacher"]


class Teacher(nn.Module):
    """A frozen model in evaluation mode, optionally quantised, or offloaded between calls.

    Args:
        model: the teacher. With `bits` it is changed in place.
        bits: store the weights of linear layers with 8 or 4 bits and one scale for each row; None: do not change them.
        offload_to: device of the parameters between calls, such as "cpu"; None: they stay on their device.
        device: device of the parameters during a call; needed with `offload_to`.

    Raises:
        CompressionError: `bits` is not 8, 4 or None, or only one of `offload_to` and `device` is given.
    """

    def __init__(
        self, model: nn.Module, *, bits: int | None = None, offload_to: str | torch.device | None = None,
        device: str | torch.device | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if bits not in (None, 4, 8):
            raise CompressionError(f"Teacher(bits=...): got {bits}, expected 8, 4 or None")
        if (offload_to is None) != (device is None):
            raise CompressionError("Teacher: offload_to and device belong together; pass both or none")
        if bits is not None:
            quantize_linears(model, bits)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.model = model.eval()
        self._offload_to, self._device = offload_to, device
        if offload_to is not None:
            self.model.to(offload_to)

    def train(self, mode: bool = True) -> Teacher:
        """Do nothing: a teacher stays in evaluation mode."""
        return self

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, without gradients."""
        if self._offload_to is None:
            return self.model(*args, **kwargs)
        self.model.to(self._device)
        try:
            return self.model(*args, **kwargs)
        finally:
            self.model.to(self._offload_to)


def quantize_linears(model: nn.Module, bits: int) -> None:
    """Replace every `Linear` by a `QuantizedLinear` with one scale for each row, in place."""
    for name, module in list(model.named_modules()):
        if name and type(module) is nn.Linear and kind_of(module) is not None:
            packed, _ = pack_dense(module.weight, bits, module.out_features)
            recursive_setattr(model, name, QuantizedLinear(packed, module.bias))


class DistillationLoss(nn.Module):
    """The loss of a student with a teacher.

    Args:
        student, teacher: the models; the teacher is called by the loss.
        temperature: T, softens both distributions.
        alpha: weight of the logits' term; the task has 1 - alpha.
        hidden: maps names of the student's modules to names of the teacher's modules, whose outputs should be equal.
        beta: weight of the terms of `hidden`.
        attention: as `hidden`, for modules whose output (or the last tensor of a tuple) is the attention's weights.
        gamma: weight of the terms of `attention`.
        stop_step: from this step on only the task's loss counts; None: distil to the end.
        project: for modules of `hidden` whose width differs from the teacher's: maps the name of the student's module
            to (student's width, teacher's width). A linear map is learnt; its parameters belong to this module, so give
            them to the optimizer.

    Raises:
        CompressionError: a named module does not exist, or a number is out of range.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, *, temperature: float = 1.0, alpha: float = 0.5,
        hidden: Mapping[str, str] | None = None, beta: float = 1.0, attention: Mapping[str, str] | None = None,
        gamma: float = 1.0, stop_step: int | None = None, project: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not temperature > 0 or not 0 <= alpha <= 1:
            raise CompressionError(
                f"DistillationLoss: got temperature={temperature}, alpha={alpha}; expected temperature > 0, alpha in"
                " [0, 1]"
            )
        self.temperature, self.alpha, self.beta, self.gamma = temperature, alpha, beta, gamma
        self.stop_step, self.steps = stop_step, 0
        # In a tuple, so that it does not become a child module: optimizers and checkpoints must not see it.
        self._teacher = (teacher,)
        self._pairs = [("hidden", s, t) for s, t in (hidden or {}).items()]
        self._pairs += [("attention", s, t) for s, t in (attention or {}).items()]
        self._seen: dict[tuple[str, str], torch.Tensor] = {}
        self.projections = nn.ModuleDict()
        for name, (inputs, outputs) in (project or {}).items():
            self.projections[name.replace(".", "/")] = nn.Linear(inputs, outputs, bias=False)
        self._handles = []
        inner = teacher.model if isinstance(teacher, Teacher) else teacher
        for role, model, column in (("student", student, 1), ("teacher", inner, 2)):
            for name in {pair[column] for pair in self._pairs}:
                self._handles.append(_module(model, name, role).register_forward_hook(self._keep(role, name)))

    def _keep(self, role: str, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if role == "teacher" or torch.is_grad_enabled():
                self._seen[role, name] = output

        return hook

    def forward(
        self, student_logits: torch.Tensor, task_loss: torch.Tensor, inputs: tuple[Any, ...] | Mapping[str, Any]
    ) -> torch.Tensor:
        """The loss after a forward pass of the student.

        Args:
            student_logits: (..., classes).
            task_loss: the student's own loss, a scalar.
            inputs: arguments of the teacher: a tuple, or a mapping of keyword arguments.

        Raises:
            CompressionError: the shapes of student and teacher differ, or a named module did not run.
        """
        if not self.active:
            self._seen.clear()
            return task_loss
        out = self._teacher[0](**inputs) if isinstance(inputs, Mapping) else self._teacher[0](*inputs)
        teacher_logits = _logits(out)
        if teacher_logits.shape != student_logits.shape:
            raise CompressionError(
                f"DistillationLoss: the student's logits have shape {tuple(student_logits.shape)}, the teacher's "
                f"{tuple(teacher_logits.shape)}; both need the same classes and positions"
            )
        loss = (1 - self.alpha) * task_loss + self.alpha * logits_loss(student_logits, teacher_logits, self.temperature)
        for what, ours, theirs in self._pairs:
            weight = self.beta if what == "hidden" else self.gamma
            loss = loss + weight * self._distance(what, ours, theirs)
        self._seen.clear()
        return loss

    def _distance(self, what: str, ours: str, theirs: str) -> torch.Tensor:
        found = []
        for role, name in (("student", ours), ("teacher", theirs)):
            output = self._seen.get((role, name))
            if output is None:
                raise CompressionError(f"DistillationLoss: {name} of the {role} did not run in this forward pass")
            found.append(_tensor(output, last=what == "attention"))
        mine, its = found
        key = ours.replace(".", "/")
        if what == "hidden" and key in self.projections:
            mine = self.projections[key](mine)
        if mine.shape != its.shape:
            raise CompressionError(
                f"DistillationLoss: {ours} gives shape {tuple(mine.shape)}, {theirs} of the teacher {tuple(its.shape)};"
                f" learn a map with project={{{ours!r}: ({mine.shape[-1]}, {its.shape[-1]})}}"
            )
        return nn.functional.mse_loss(mine.float(), its.detach().float())

    @property
    def active(self) -> bool:
        """Whether the teacher still enters the loss."""
        return self.stop_step is None or self.steps < self.stop_step

    def step(self) -> None:
        """Count an optimizer step. Call it after each one; only `stop_step` needs it."""
        self.steps += 1

    def remove(self) -> None:
        """Remove the hooks from both models."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def logits_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over all positions.

    Args:
        student, teacher: logits, (..., classes).
        temperature: T.
    """
    ours = torch.log_softmax(student.float().flatten(0, -2) / temperature, -1)
    theirs = torch.log_softmax(teacher.detach().float().flatten(0, -2) / temperature, -1)
    return nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def _logits(out: Any) -> torch.Tensor:
    if isinstance(out, Mapping) and "logits" in out:
        return out["logits"]
    return getattr(out, "logits", None) if hasattr(out, "logits") else _tensor(out, last=False)  # pyright: ignore


def _tensor(output: Any, *, last: bool) -> torch.Tensor:
    if isinstance(output, (tuple, list)):
        output = [item for item in output if isinstance(item, torch.Tensor)][-1 if last else 0]
    return output


def _module(model: nn.Module, name: str, role: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [n for n, _ in model.named_modules() if n]
        raise CompressionError(f"DistillationLoss: the {role} has no module {name!r}{near(name, known)}") from None
