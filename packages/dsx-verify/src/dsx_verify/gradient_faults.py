"""Finds the kind of a fault in a gradient or a loss: which mistake would give exactly the values that were seen.

A gradient is a weighted sum over samples, and the oracle has each summand. So a wrong gradient is first written as such
a sum, by least squares: its weights say whether all is scaled, samples of other ranks or micro-batches are missing, or
count twice. What is no such sum is compared with the values of other tensors, of earlier parameters, and of coarser
dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from dsx_core.errors import first_few
from dsx_core.together import some_ranks

from .case import Case, fit, flat, near, ratio
from .expected import Computed, rounding
from .receipt import Fault

__all__ = ["explain_gradient", "explain_loss"]


def explain_gradient(case: Case) -> Fault:
    """The kind of fault of a gradient."""
    lead, computed = case.lead, case.computed
    seen = case.observed[lead.rank]
    own = seen.unclipped if lead.kind == "gradient" and seen.unclipped else seen.gradients
    assert computed is not None  # noqa: S101 - a gradient differs only after it was computed
    expected = computed.mean()
    names = [name for name in case.names if name in expected]
    got = {name: own.get(name, torch.zeros_like(expected[name])).double() for name in expected}
    if all(float(got[name].abs().max()) == 0 for name in names[:1]):
        return case.fault("missing gradient", "it is zero everywhere" if lead.name in own else "there is no gradient")
    noise = max(20 * max(computed.noise[name] for name in names), 20 * rounding(case.expected.reduce), 1e-4)
    partial = _untied(case, own, expected[lead.name], noise) or _sum_over_ranks(case, expected[lead.name], noise)
    if partial is not None:
        return partial
    for chosen in (names, names[:1]):
        found = _uniform(case, got, expected, chosen, noise) or _by_samples(case, got, computed, chosen, noise)
        if found is not None:
            return found
    return _other(case, got[lead.name], expected, noise) or case.fault("values")


def _untied(case: Case, own: Any, expected: torch.Tensor, noise: float) -> Fault | None:
    """Whether another name of the tensor has a gradient of its own, and both together are right."""
    aliases = {} if case.reference is None else case.reference.aliases
    others = [name for name, first in aliases.items() if first == case.lead.name and name in own]
    if not others or case.lead.name not in own:
        return None
    total = flat([sum(own[name].double() for name in [case.lead.name, *others])])  # type: ignore[list-item]
    factor, error = ratio(total, flat([expected]))
    if error < noise and near(factor, _clip(case) if case.lead.kind == "clipped gradient" else 1.0, noise):
        return case.fault("tied weights", f"{', '.join(others)} has a gradient of its own; the sum would be right")
    return None


def _sum_over_ranks(case: Case, expected: torch.Tensor, noise: float) -> Fault | None:
    """Whether ranks hold summands of the right gradient, or shares of the samples, that were not added up."""
    name, unclipped = case.lead.name, case.lead.kind == "gradient"
    seen = [o.unclipped if unclipped and o.unclipped else o.gradients for o in case.observed]
    shares = [grads[name].double() for grads in seen if name in grads]
    if len(shares) < 2 or all(torch.equal(share, shares[0]) for share in shares):
        return None
    total, right = flat([sum(shares)]), flat([expected])  # type: ignore[list-item]
    factor, error = ratio(total, right)
    for value, words in ((1.0, "sum"), (float(len(shares)), "mean")):
        if error < noise and near(factor, value * (1.0 if unclipped else _clip(case)), noise):
            return case.fault("missing reduction", f"each rank holds other values; their {words} would be right")
    return None


def _uniform(case: Case, got: Any, expected: Any, names: list[str], noise: float) -> Fault | None:
    factor, error = ratio(flat([got[n] for n in names]), flat([expected[n] for n in names]))
    clip = _clip(case)
    if error > noise:
        return None
    if case.lead.kind == "clipped gradient":
        relative = factor / clip
        line = f"clipped gradients are {relative:.6g} times what they should be (clipping factor {clip:.6g})"
        if near(relative, 1 / clip, noise):
            return case.fault("not clipped", line)
        if near(relative, clip, noise):
            return case.fault("clipped twice", line, f"{clip:.6g} squared would do this")
        if case.observed[case.lead.rank].unclipped or len(names) > 1:
            named = _factor(case, relative, noise)
            return case.fault(named[0] if named else "clipped by another norm", line, *(named[1:] if named else ()))
        return None
    line = f"{len(names)} of them are {factor:.6g} times what they should be (error of this fit: {error:.1e})"
    named = _factor(case, factor, noise)
    if named is None and abs(factor) < 1e-6:
        return case.fault("missing gradient", line)
    return case.fault(named[0], line, named[1]) if named else case.fault("scaled", line)


def _factor(case: Case, factor: float, noise: float) -> tuple[str, str] | None:
    """The kind and words for a factor by which values are scaled."""
    ranks, micro, scale = case.count, case.expected.accumulation, case.observed[case.lead.rank].scale
    known = [
        ("scaled by the ranks", ranks, "the data-parallel ranks"),
        ("scaled by the ranks", len(case.observed), "all ranks"),
        ("scaled by accumulation", micro, "the micro-batches of an update"),
        ("scaled by accumulation", ranks * micro, "ranks times micro-batches"),
        ("scaled by the loss scale", scale, "the loss scale"),
    ]
    for kind, number, words in known:
        for value, how in ((number, "times"), (1 / number, "divided by"), (number**2, "times the square of")):
            if number != 1 and near(factor, value, noise):
                also = [other for _, n, other in known if n == number and other != words and n != 1]
                also_text = f" (or {', '.join(dict.fromkeys(also))})" if also else ""
                return kind, f"{how} {number:g}: {words}{also_text}"
    return None


def _by_samples(case: Case, got: Any, computed: Computed, names: list[str], noise: float) -> Fault | None:
    """Write the gradient as a weighted sum of the samples' gradients; the right weights are all 1."""
    parts = [flat([w * part[n] for n in names]) for w, part in zip(computed.weights, computed.parts)]
    columns = torch.stack(parts, dim=1)
    if columns.shape[1] < 2 or columns.shape[0] < 2 * columns.shape[1]:
        return None
    weights, error = fit(flat([got[n] for n in names]), columns)
    if error > noise:
        return None
    keys = [(sample.rank, sample.micro) for sample in computed.samples]
    by_sample = dict(zip(keys, weights))
    clip = _clip(case) if case.lead.kind == "clipped gradient" else 1.0
    line = "weights of the samples (1 is right): " + ", ".join(
        f"rank {rank} micro-batch {micro}: {weight / clip:.4g}" for (rank, micro), weight in list(by_sample.items())[:6]
    )
    return _samples_fault(case, by_sample, computed, line)


def _samples_fault(case: Case, weights: dict[tuple[int, int], float], computed: Computed, line: str) -> Fault:
    largest = max(map(abs, weights.values()))
    absent = {key for key, weight in weights.items() if abs(weight) < 0.02 * largest}
    gone = {rank for rank, _ in weights if all((r, m) in absent for r, m in weights if r == rank)}
    own = case.indices[case.lead.rank]
    if gone and own not in gone:
        left = sorted({rank for rank, _ in weights} - gone)
        return case.fault(
            "missing reduction", line, f"only samples of rank {some_ranks(left)} are in it, on rank {own}"
        )
    micros = sorted({m for _, m in weights if all(key in absent for key in weights if key[1] == m)})
    if absent:
        said = (
            f"micro-batch {first_few(micros, 8)} of every rank is missing" if micros else f"missing: {sorted(absent)}"
        )
        return case.fault("lost or doubled micro-batch", line, said)
    keys = [(sample.rank, sample.micro) for sample in computed.samples]
    equal = [weights[key] * share for key, share in zip(keys, computed.weights)]
    if case.expected.weight is not None and max(equal) - min(equal) < 0.01 * max(equal):
        said = "the shares are equal for all micro-batches, in place of those that were asked for"
        return case.fault("sample weights", line, said)
    by_rank = {rank: [w for (r, _), w in weights.items() if r == rank] for rank, _ in weights}
    flat_ranks = all(max(values) - min(values) < 0.02 * largest for values in by_rank.values())
    own_only = [values[0] for rank, values in by_rank.items() if rank != own]
    if flat_ranks and case.count > 1 and own_only and max(own_only) - min(own_only) < 0.02 * largest:
        return case.fault("sample weights", line, "the samples of one rank count more than those of the others")
    if not flat_ranks and all(near(w, round(w), 0.02) for w in weights.values()):
        return case.fault("lost or doubled micro-batch", line)
    return case.fault("sample weights", line)


def _other(case: Case, got: torch.Tensor, expected: dict[str, torch.Tensor], noise: float) -> Fault | None:
    """Values that are no sum of the samples' gradients."""
    name, reference, computed = case.lead.name, case.reference, case.computed
    clip = _clip(case) if case.lead.kind == "clipped gradient" else 1.0
    vector, right = flat([got]) / clip, flat([expected[name]])
    for other, value in expected.items():
        if other != name and value.shape == expected[name].shape and value.numel() > 3:
            factor, error = ratio(vector, flat([value]))
            if error < noise and abs(factor) > 1e-3:
                return case.fault("other tensor", f"it is {factor:.4g} times the gradient of {other}")
    if case.previous and reference is not None and computed is not None:
        stale = reference.gradients_at(computed.samples, case.previous)[name]
        factor, error = ratio(vector, flat([stale]))
        if error < noise and near(factor, 1.0, 10 * noise):
            return case.fault("stale weights", "it is the gradient at the parameters of before the previous update")
    module = first_module(case)
    if module:
        return case.fault("forward", f"the first module whose output differs: {module}")
    coarse = _coarser(vector, right, case.expected.reduce)
    if coarse:
        return case.fault("precision", coarse)
    return _part(case, got / clip, expected[name], noise)


def _part(case: Case, got: torch.Tensor, expected: torch.Tensor, noise: float) -> Fault | None:
    """A tensor of which a part is right: what is wrong with the rest."""
    a, b = got.double().reshape(-1), expected.double().reshape(-1)
    wrong = (a - b).abs() > noise * b.abs().max()
    share = float(wrong.double().mean())
    if not 0 < share < 0.95:
        return None
    place = torch.nonzero(wrong)[:, 0]
    line = f"{share:.0%} of the elements are wrong, between {int(place[0])} and {int(place[-1])} of {a.numel()}"
    if float(a[wrong].abs().max()) == 0.0:
        return case.fault("missing gradient", line, "the wrong elements are zero")
    factor, error = ratio(a[wrong], b[wrong])
    if error < noise:
        named = _factor(case, factor, noise)
        said = f"the wrong elements are {factor:.6g} times what they should be"
        return case.fault(named[0] if named else "scaled", line, said, *(named[1:] if named else ()))
    computed = case.computed
    if computed is not None and int(wrong.sum()) >= 2 * len(computed.parts):
        parts = [w * part[case.lead.name].reshape(-1)[wrong] for w, part in zip(computed.weights, computed.parts)]
        weights, error = fit(a[wrong], torch.stack(parts, dim=1))
        if error < noise:
            keys = [(sample.rank, sample.micro) for sample in computed.samples]
            told = ", ".join(f"rank {r} micro-batch {m}: {w:.3g}" for (r, m), w in zip(keys, weights))
            return _samples_fault(case, dict(zip(keys, weights)), computed, f"{line}; weights of samples there: {told}")
    return case.fault("values", line)


def _coarser(got: torch.Tensor, right: torch.Tensor, asked: torch.dtype) -> str:
    """Words, if values are right up to the rounding of a coarser dtype than was asked for."""
    for dtype in (torch.float16, torch.bfloat16):
        error = float((got - right).abs().max()) / max(float(right.abs().max()), 1e-300)
        if rounding(dtype) > rounding(asked) and rounding(dtype) / 64 < error < 16 * rounding(dtype):
            exactly = bool((got == got.to(dtype).double()).all())
            held = f", and every value is one of {dtype}" if exactly else ""
            return f"relative error {error:.1e}: the rounding of 16-bit numbers, where {asked} was asked for{held}"
    return ""


# - Losses


def explain_loss(case: Case) -> Fault:
    """The kind of fault of a loss."""
    lead, computed = case.lead, case.computed
    got, expected = lead.got, lead.expected
    assert computed is not None  # noqa: S101 - a loss differs only after it was computed
    noise = max(1e-4, 20 * computed.loss_noise)
    others = [key for key, loss in computed.losses.items() if abs(loss - got) < noise * abs(loss)]
    module = first_module(case)
    if others and not module:
        return case.fault("other samples", f"it is the loss of (rank, micro-batch) {others[0]}")
    if not module and expected:
        named = _factor(case, got / expected, noise)
        return case.fault("loss scaled", f"{got / expected:.6g} times what it should be", *(named[1:] if named else ()))
    if others:
        return case.fault("other samples", f"it is the loss of (rank, micro-batch) {others[0]}")
    return case.fault("forward", f"the first module whose output differs: {module or 'unknown'}")


def first_module(case: Case) -> str:
    """The first module whose output differs from plain torch, "" if none does that was seen on both sides."""
    computed = case.computed
    if computed is None:
        return ""
    tolerance = max(1e-4, 20 * max(computed.noise.values(), default=0.0), 20 * computed.loss_noise)
    index = case.indices[case.lead.rank]
    for micro, mine in enumerate(case.observed[case.lead.rank].passes):
        plain = computed.seen.get((index, micro))
        for name, (shape, total, size) in (plain.outputs if plain else {}).items():
            got = mine.outputs.get(name)
            if got is None or got[0] != shape:
                continue
            if max(abs(got[1] - total), abs(got[2] - size)) > tolerance * max(size, 1e-12):
                return name or "the model itself"
    return ""


def _clip(case: Case) -> float:
    limit, computed = case.expected.max_norm, case.computed
    if limit <= 0 or computed is None:
        return 1.0
    norm = float(flat_norm(computed.mean()))
    return min(1.0, limit / (norm + 1e-6))


def flat_norm(tensors: dict[str, torch.Tensor]) -> float:
    """The global L2 norm."""
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5
