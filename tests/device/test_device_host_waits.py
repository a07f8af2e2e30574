"""Budgets: how often the host may wait for the device in one step.

A wait of the training thread, or of backward's, empties the queue of the device. The thread of the CPU optimizer step
waits, too, for the gradients of one unit after the other: the training goes on meanwhile, and its waits are counted
apart. The limits are goals; where dsx needs more today, the test must fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from device_matrix import SAMPLE, dealt


@dataclass(frozen=True)
class Budget:
    """At most `limit` waits of the training in the last step of a case (a forward for experts).

    `today` is what a case needs that misses its goal.
    """

    case: str
    world: int
    limit: int
    today: int | None = None


THREAD = "dsx-zero-step"
"""The name of the thread of the CPU optimizer step."""
UNITS = 4
"""The units of the small GPT; that thread waits once for each."""

BUDGETS = [
    *(Budget(f"stage{stage}-fp32-device", world, 0) for stage in range(4) for world in (1, 2)),
    Budget("stage2-bf16-device", 1, 1),
    Budget("stage3-fp16-device", 1, 1),
    Budget("stage2-bf16-device", 2, 1),
    Budget("stage3-fp16-device", 2, 1),
    Budget("agreed-by-the-norm-in-fp16", 2, 1),  # the host reads what the ranks agree on and the norm together
    Budget("stage2-fp32-optimizer-host", 1, 2),
    Budget("stage2-fp32-optimizer-host", 2, 2),
    # Backward waits for nothing: the two waits are those of the step, for the last gradients and for their norm.
    Budget("accumulation-on-host", 1, 2),
    Budget("accumulation-on-host", 2, 2),
    # However many micro-batches: the losses and the check of the gradients are read together, behind the last backward.
    *(Budget(f"{case}{count}", 2, 1) for case in ("pipeline-1f1b", "pipeline-zero-bubble") for count in ("", "-of-8")),
    *(Budget(f"staged-{case}", 2, 1) for case in ("1f1b", "1f1b-of-8", "zero-bubble", "tied")),
    Budget("staged-interleaved", 2, 2),  # once for each of the two parts of the model that a stage has
    # The training thread only reads the norm.
    Budget("speculative-host-step", 1, 1),
    Budget("speculative-host-step", 2, 1),
    Budget("accumulation-with-parameters-on-disk", 1, 2),
    # Here the host cannot but wait, once per unit and backward (of four): to copy into pages that are not locked, or to
    # add up what comes from a disk. The step from a disk has four more: the norm, the last gradients, and the first
    # read and the last write of masters.
    Budget("accumulation-pageable", 1, UNITS * 4 + 2),
    Budget("accumulation-on-disk", 1, UNITS * 4 + 4),
    Budget("pushed-asleep", 2, 0),  # the last step, behind pushes and a wake that does not block
    Budget("activations-alone", 1, 0),
    Budget("activations-under-ddp", 2, 0),
    Budget("activations-under-fsdp", 2, 0),
    Budget("sequences-in-a-ring", 2, 0),
    Budget("sequences-with-attention-on-host", 2, 0),
    Budget("sequences-in-host-chunks", 1, 0),
    Budget("sequences-in-host-chunks", 2, 0),
    Budget("muon-with-clipped-logits", 2, 0),
    Budget("experts-dropless", 2, 1),
    Budget("experts-with-capacity", 2, 1),
]


def described(budget: Budget) -> object:
    reason = f"the goal is {budget.limit} waits; today there are {budget.today}"
    marks = [] if budget.today is None else [pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError)]
    return pytest.param(budget, marks=marks, id=f"{budget.case}-{budget.world}")


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("budget", [described(budget) for budget in BUDGETS])
def test_the_host_waits_no_more_than_its_budget(budget: Budget, sampled) -> None:
    for waits in waits_of(budget.case, budget.world, sampled):
        of_the_step = sum(times for *_, thread, times in waits if thread == THREAD)
        of_the_training = sum(times for *_, times in waits) - of_the_step
        said = "\n".join(f"{times} x {what} at {at} in {thread}" for what, at, thread, times in waits)
        assert of_the_training <= budget.limit, said
        assert of_the_step <= UNITS, said


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", ["pipeline-1f1b", "pipeline-zero-bubble"])
def test_more_micro_batches_of_a_pipeline_make_the_host_wait_no_more(case: str, sampled) -> None:
    few, many = waits_of(case, 2, sampled), waits_of(f"{case}-of-8", 2, sampled)
    assert [sum(n for *_, n in waits) for waits in few] == [sum(n for *_, n in waits) for waits in many], many


def waits_of(case: str, world: int, sampled) -> list[list[tuple[str, str, str, int]]]:
    """The waits of every rank in the last step: what, where, in which thread, how often. A case that did not run is no
    success.
    """
    results, output = sampled(world)
    ranks = results.get((case, dealt(SAMPLE[world].index(case))), [])
    if len(ranks) != world or any(rank["error"] for rank in ranks):
        pytest.fail(f"{case} did not run: {[rank['error'] for rank in ranks]}\n{output}")
    return [[(what, at, thread, n) for what, at, thread, n in rank["waits"]] for rank in ranks]
