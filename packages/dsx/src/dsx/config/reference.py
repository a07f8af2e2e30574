"""The reference page of all keys. It is generated from the schema, so that it always agrees with the code.

``python -m dsx.config reference`` prints it; ``docs/config.md`` is its output, and a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from .availability import MEANINGLESS, REFUSED
from .components import OPTIMIZER_ARGUMENTS
from .describe import type_text
from .normal import SECOND_NAMES
from .notes import NOTES
from .sections import judged, whole_model
from .translate import model_in, named_model_in

__all__ = ["reference"]

_HEAD = """# Configuration reference

<!-- Written by `python -m dsx.config reference`; change the models in the packages, not this page. -->

A configuration is one JSON object: a dictionary, a file, or base64 text. Files may contain `//`, `#` and `/* */`
comments and trailing commas. Whole numbers may be written as `5e8`. An unknown key, a wrong type, a key given twice or
two keys that contradict each other are errors; all of them are reported together, with their place in the file.

Any value may be `"auto"`. Then it is the default, or it is computed (batch sizes), or it is taken from the optimizer
(`scheduler.params.warmup_max_lr`). `dsx config explain FILE` shows every value in effect and where it came from.

In Python the same keys are types: `dsx.Config(zero_optimization=dsx.Zero(stage=3))` makes a dictionary, and an editor
completes its keys and marks a misspelt one. A dictionary that is annotated (`config: dsx.Config = {...}`) is checked in
the same way. The types of all sections are in `dsx.config.typed`; whole numbers are integers there (`500_000_000`).

The last column says whether a key works today. *not available* means that dsx does not have the feature: using the key
is an error, and the text says why; a block that is switched off is accepted. *refused* means the same; the text says
what to use instead. *no effect* means that the key is accepted with a warning, because published configurations have
it.
"""

_BATCH = """## Batch sizes

`train_batch_size` = `train_micro_batch_size_per_gpu` * `gradient_accumulation_steps` * number of data-parallel ranks.

| given | computed |
|---|---|
| all three | checked |
| batch and micro-batch | accumulation steps |
| batch and accumulation steps | micro-batch |
| micro-batch and accumulation steps | batch |
| batch only | accumulation 1, micro-batch |
| micro-batch only | accumulation 1, batch |
| accumulation only, or nothing | an error |
"""

_PRECISION = """## Precision

| mode | parameters | compute | accumulation | reduction | master | loss scale |
|---|---|---|---|---|---|---|
| none | fp32 | fp32 | fp32 | fp32 | fp32 | no |
| `bf16` | bf16 | bf16 | bf16 | bf16 | fp32 | no |
| `fp16` | fp16 | fp16 | fp16 | fp16 | fp32 | yes |
| `torch_autocast` | fp32 | `dtype` | fp32 | fp32 | fp32 | for float16 |
| `amp` O1 | fp32 | fp16 | fp32 | fp32 | fp32 | yes |

`data_types.grad_accum_dtype` changes the accumulation, `communication_data_type` the reduction. Buffers keep the dtype
with which they were made (rotary frequencies would be useless in 16 bits); `data_types.buffer_dtype` casts them. fp16
and bf16 are not mixed in one run: neither can represent all values of the other.

The loss is multiplied by the scale in backward, and gradients are divided by the same scale, in every ZeRO stage and
also without ZeRO. The same rules (hysteresis, window, minimum) hold everywhere. The gradients of the step after which
the scale doubles are still divided by the old scale.
"""


def reference() -> str:
    """Return the page as Markdown."""
    root = whole_model()
    states = _States.of(root)
    parts = [_HEAD, _BATCH, _PRECISION, _table("Top level", "", root, states)]
    for path, model in _sections(root, ""):
        parts.append(_table(f"`{path}`", path, model, states))
    parts += [_optimizers(), _schedules(), _second_names()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner, named = model_in(field.annotation), named_model_in(field.annotation)
        if named is not None:
            path, inner = f"{path}.<name>", named
        if inner is not None:
            yield path, inner
            yield from _sections(inner, path + ".")


def _table(title: str, path: str, model: type[BaseModel], states: _States) -> str:
    lines = [f"## {title}", ""]
    if path and model.__doc__:
        lines += [model.__doc__.strip().split("\n\n")[0].replace("\n", " "), ""]
    state = states(path)
    if state:
        lines += [f"Works: {state}.", ""]
    lines += ["| key | type | default | what it does | works |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        full = f"{path}.{name}" if path else name
        default = "" if field.is_required() else _default(field.get_default(call_default_factory=True))
        note = " ".join(part for part in (field.description or "", _note(full)) if part)
        cells = (f"`{name}`", type_text(field), default, note, states(full) or states(path) or "yes")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def _default(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "see below"
    return f"`{json.dumps(value)}`"


def _note(path: str) -> str:
    return f"**{NOTES[path]}**" if path in NOTES else ""


@dataclass(frozen=True)
class _States:
    """Judgements of keys and sections, by path."""

    not_yet: Mapping[str, str]
    without_effect: Mapping[str, str]
    old_names: Mapping[str, str]

    @classmethod
    def of(cls, model: type[BaseModel]) -> _States:
        without_effect = {**MEANINGLESS, **judged(model, "NO_EFFECT")}
        return cls(judged(model, "NOT_YET"), without_effect, judged(model, "OLD_NAMES"))

    def __call__(self, path: str) -> str:
        """Return ``not available: ...``, ``refused: ...`` or ``no effect: ...`` for a key or a section that contains
        it; for an old name, what it is read as.
        """
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            head = ".".join(parts[:end])
            if head in self.not_yet:
                return f"not available: {self.not_yet[head]}"
            if head in REFUSED:
                return f"refused: {REFUSED[head]}"
            if head in self.without_effect:
                return f"no effect: {self.without_effect[head]}"
            if head in self.old_names:
                return self.old_names[head]
        return ""


def _optimizers() -> str:
    lines = ["## Optimizers", "", "`optimizer.type` in any case; any other name is looked up in `torch.optim`.", ""]
    lines += ["| type | params |", "|---|---|"]
    lines += [f"| {name} | {', '.join(f'`{item}`' for item in items)} |" for name, items in OPTIMIZER_ARGUMENTS.items()]
    lines += ["", "`Adam` decouples weight decay, as `AdamW` does, unless `adam_w_mode` is false."]
    return "\n".join(lines)


def _schedules() -> str:
    import inspect

    from ..lr_schedules import SCHEDULES

    lines = ["## Schedules", "", "`scheduler.type`; any other name is looked up in `torch.optim.lr_scheduler`.", ""]
    lines += ["| type | params (default) |", "|---|---|"]
    for name, schedule in SCHEDULES.items():
        cells = []
        for item in inspect.signature(schedule).parameters.values():
            if item.name in ("optimizer", "last_batch_iteration"):
                continue
            required = item.default is inspect.Parameter.empty
            cells.append(f"`{item.name}` (required)" if required else f"`{item.name}` (`{json.dumps(item.default)}`)")
        lines.append(f"| {name} | {', '.join(cells)} |")
    lines += [
        "",
        (
            "`warmup_max_lr` null takes the optimizer's own rate. A schedule sets its starting value when it is built"
            " and is"
        ),
        "stepped after every update, as DeepSpeed does it: the first two updates of a warm-up run at its minimum.",
        (
            "With `start_at_first_value` the repeated value is left out: update k runs with value k of the sequence,"
            " counted"
        ),
        (
            "from 0. `OneCycle` sets `betas[1]` to `cycle_beta2` (null leaves it), and its momentum decays within its"
            " bounds"
        ),
        "instead of growing past 1.",
    ]
    return "\n".join(lines)


def _second_names() -> str:
    lines = ["## Second names", "", "| also read as | key |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{second}` | `{first}` |" for second, first in SECOND_NAMES.items())])
