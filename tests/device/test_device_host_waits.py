"""Budgets: how often the host may wait for the device in one step.

Every wait empties the queue of the device. The limits are goals; where dsx needs more today, the test must fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from device_matrix import SAMPLE, dealt


@dataclass(frozen=True)
class Budget:
    """At most `limit` waits in the last step of a case (a forward for experts), at lines whose file has `where`.

    `today` is what a case needs that misses its goal.
    """

    case: str
    world: int
    limit: int
    where: str = ""
    today: int | None = None


THREAD = 4
"""Waits of the thread of the host's step for gradients, one per unit (of four). They empty no queue of the device,
because the training thread goes on; the counts do not tell the threads apart.
"""

BUDGETS = [
    *(Budget(f"stage{stage}-fp32-device", world, 0) for stage in range(4) for world in (1, 2)),
    Budget("stage2-bf16-device", 1, 1),
    Budget("stage3-fp16-device", 1, 1),
    Budget("stage2-bf16-device", 2, 1),
    Budget("stage3-fp16-device", 2, 1),
    Budget("agreed-by-the-norm-in-fp16", 2, 1),  # the host reads what the ranks agree on and the norm together
    Budget("stage2-fp32-optimizer-host", 1, 2 + THREAD),
    Budget("stage2-fp32-optimizer-host", 2, 2 + THREAD),
    # Backward waits for nothing: the two waits are those of the step, for the last gradients and for their norm.
    Budget("accumulation-on-host", 1, 2 + THREAD),
    Budget("accumulation-on-host", 2, 2 + THREAD),
    # However many micro-batches: the losses and the check of the gradients are read together, behind the last backward.
    *(Budget(f"{case}{count}", 2, 1) for case in ("pipeline-1f1b", "pipeline-zero-bubble") for count in ("", "-of-8")),
    *(Budget(f"staged-{case}", 2, 1) for case in ("1f1b", "1f1b-of-8", "zero-bubble", "tied")),
    Budget("staged-interleaved", 2, 2),  # once for each of the two parts of the model that a stage has
    # The thread of the host's step waits for gradients; the training thread only reads the norm.
    Budget("speculative-host-step", 1, 1, "host_step.py"),
    Budget("speculative-host-step", 2, 1, "host_step.py"),
    Budget("accumulation-with-parameters-on-disk", 1, 2 + THREAD),
    # Here the host cannot but wait, once per unit (of four) and backward (of four): to copy into pages that are not
    # locked, or to add up what comes from a disk.
    Budget("accumulation-pageable", 1, 4 * 4 + 2 + THREAD),
    Budget("accumulation-on-disk", 1, 4 * 4 + 3 + THREAD),
    Budget("activations-alone", 1, 0),
    Budget("activations-under-ddp", 2, 0),
    Budget("activations-under-fsdp", 2, 0),
    Budget("sequences-in-a-ring", 2, 0),
    Budget("sequences-with-attention-on-host", 2, 0),
    Budget("sequences-in-host-chunks", 1, 0),
    Budget("sequences-in-host-chunks", 2, 0),
    Budget("experts-dropless", 2, 1),
    Budget("experts-with-capacity", 2, 1),
]


def described(budget: Budget) -> object:
    reason = f"the goal is {budget.limit} waits; today there are {budget.today}"
    marks = [] if budget.today is None else [pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError)]
    return pytest.param(budget, marks=marks, id=f"{budget.case}-{budget.world}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("budget", [described(budget) for budget in BUDGETS])
def test_the_host_waits_no_more_than_its_budget(budget: Budget, sampled) -> None:
    for waits in waits_of(budget.case, budget.world, sampled, budget.where):
        assert sum(times for *_, times in waits) <= budget.limit, "\n".join(f"{n} x {w} at {at}" for w, at, n in waits)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["pipeline-1f1b", "pipeline-zero-bubble"])
def test_more_micro_batches_of_a_pipeline_make_the_host_wait_no_more(case: str, sampled) -> None:
    few, many = waits_of(case, 2, sampled), waits_of(f"{case}-of-8", 2, sampled)
    assert [sum(n for *_, n in waits) for waits in few] == [sum(n for *_, n in waits) for waits in many], many


def waits_of(case: str, world: int, sampled, where: str = "") -> list[list[tuple[str, str, int]]]:
    """The waits of every rank in the last step, at lines with `where`. A case that did not run is no success."""
    results, output = sampled(world)
    ranks = results.get((case, dealt(SAMPLE[world].index(case))), [])
    if len(ranks) != world or any(rank["error"] for rank in ranks):
        pytest.fail(f"{case} did not run: {[rank['error'] for rank in ranks]}\n{output}")
    return [[(what, at, n) for what, at, n in rank["waits"] if where in at] for rank in ranks]
