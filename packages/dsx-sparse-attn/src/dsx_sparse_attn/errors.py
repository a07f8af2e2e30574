"""The errors of dsx-sparse-attn: each says what it got, what it expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class SparseAttentionError(RuntimeError):
    """Base class of errors at run time in dsx-sparse-attn."""


class LayoutError(ValueError):
    """A parameter of a layout is out of range, or a layout does not fit the tensors."""


class ArgumentError(ValueError):
    """A tensor or option of an attention call has the wrong shape, dtype, device or value."""


class BackendError(SparseAttentionError):
    """No backend can do this call, or the requested one cannot; `reasons` has the reasons of every backend."""

    def __init__(self, asked: str, call: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.reasons = {name: list(why) for name, why in reasons.items()}
        lines = [f"backend={asked!r} cannot run {call}. Every backend, with what it says:"]
        lines += [f"  {name}: {'; '.join(why) if why else 'can run this'}" for name, why in self.reasons.items()]
        fit = [name for name, why in self.reasons.items() if not why]
        lines.append(f"Use backend={fit[0]!r} or 'auto'." if fit else "Change what they name.")
        super().__init__("\n".join(lines))
