"""Removes keys that DeepSpeed ignores and that dsx refuses, with one warning that names them.

dsx refuses unknown keys, because a mistyped one would have no effect. DeepSpeed ignores unknown keys of the document,
and programs rely on that: their users cannot change what a program writes. These keys are removed:

* keys of the document that DeepSpeed does not know either. A name that is nearly that of a known key is shown beside
  it. Unknown keys inside a section stay errors, as in DeepSpeed;
* `offload_optimizer` at stage 0, and `offload_param` below stage 3: there is nothing to offload (Accelerate asks for
  both from stage 2 on, trl sets stage 0 and keeps them);
* a `warmup_type` of a scheduler that is neither "log" nor "linear": DeepSpeed takes "log";
* `torch_autocast.lower_precision_safe_modules`, the modules whose gradients DeepSpeed reduces in the lower precision.

Accelerate writes `"steps_per_print": inf`, which means never. It is replaced by None.

A file may be Hjson: lines without commas, text without quotes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from dsx.config.source import Document, read
from dsx.errors import DsxConfigError
from dsx_core.errors import edits

from .errors import CompatWarning

__all__ = ["client_config"]

_READ_BY_DEEPSPEED = frozenset({"weight_quantization"})
"""Keys that dsx does not have and that DeepSpeed acts on: they are not removed, so dsx refuses them."""

_NEEDS_STAGE = {
    "offload_optimizer": 1, "cpu_offload": 1, "offload_param": 3, "cpu_offload_param": 3, "cpu_offload_params": 3,
}  # fmt: skip
"""Lowest stage at which a key of `zero_optimization` offloads something."""

_WARMUPS = (None, "auto", "log", "linear")
_SAFE_MODULES = "lower_precision_safe_modules"


def client_config(config: Any) -> Any:
    """The configuration without the keys that have no effect.

    Args:
        config: a mapping, the path of a JSON file, or base64 text of JSON. It is not changed.

    Returns:
        A dictionary for a mapping; for a file or text the path or text itself, or a `dsx.config.source.Document`, which
        still knows the lines.

    Raises:
        DsxConfigError: it cannot be read.

    Warns:
        CompatWarning: names the keys that were removed.
    """
    if isinstance(config, Mapping):
        cleaned: Any = dict(config)
        dropped = _remove(cleaned)
    else:
        document, is_json = _read(config)
        dropped = _remove(document.data)
        cleaned = config if is_json and not dropped else document
    if dropped:
        warnings.warn(
            f"deepspeed.initialize: these keys of the configuration have no effect and are left out:"
            f" {', '.join(dropped)} [DSX159] docs: dsx explain DSX159",
            CompatWarning,
            stacklevel=3,
        )
    return cleaned


def _read(source: Any) -> tuple[Document, bool]:
    """The document, and whether it is JSON; if not, it is Hjson, which DeepSpeed reads too."""
    try:
        return read(source), True
    except DsxConfigError:
        return read(source, hjson=True), False


def _remove(data: dict[str, Any]) -> list[str]:
    """Remove the keys from `data` (sections are replaced, not changed). Returns their names, with reasons."""
    dropped = []
    for key, shown in list(_unknown(data)):
        del data[key]
        dropped.append(shown)
    zero = data.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
    if isinstance(zero, Mapping) and isinstance(stage, int):
        unused = [key for key, lowest in _NEEDS_STAGE.items() if stage < lowest and _offloads(zero.get(key))]
        data["zero_optimization"] = {key: value for key, value in zero.items() if key not in unused}
        dropped += [f"zero_optimization.{key} (nothing to offload at stage {int(stage)})" for key in unused]
    autocast = data.get("torch_autocast")
    if isinstance(autocast, Mapping) and autocast.get(_SAFE_MODULES) is not None:
        data["torch_autocast"] = {key: value for key, value in autocast.items() if key != _SAFE_MODULES}
        reason = "gradients are reduced in one data type, communication_data_type"
        dropped.append(f"torch_autocast.{_SAFE_MODULES} ({reason})")
    scheduler = data.get("scheduler")
    arguments = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    if isinstance(arguments, Mapping) and arguments.get("warmup_type", "log") not in _WARMUPS:
        kept = {key: value for key, value in arguments.items() if key != "warmup_type"}
        data["scheduler"] = {**scheduler, "params": kept}
        dropped.append(f"scheduler.params.warmup_type ({arguments['warmup_type']!r} is unknown, log is used)")
    if data.get("steps_per_print") == math.inf:
        data["steps_per_print"] = None
    return dropped


def _offloads(section: Any) -> bool:
    return section.get("device") != "none" if isinstance(section, Mapping) else section is True


def _unknown(data: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Each key of the document that neither dsx nor DeepSpeed knows, and how to show it."""
    from dsx.config.sections import whole_model  # lazy import: it loads pydantic and the sections of all packages
    from dsx.config.translate import known_names

    known = {*known_names(whole_model(), ()), "$schema", *_READ_BY_DEEPSPEED}
    for key in data:
        if isinstance(key, str) and key not in known:
            near = min(known, key=lambda name: (edits(key, name), name)) if len(key) < 100 else ""
            is_near = bool(near) and edits(key, near) <= max(1, len(near) // 8)
            yield key, f"{key} (did you mean {near}?)" if is_near else key
