"""Schedules are complete, free of deadlock, and have the length and memory of their formulas; text form, validation."""

import pytest
from dsx_pipe.errors import ScheduleError
from dsx_pipe.schedule import (
    BUILDERS,
    Action,
    InferenceSchedule,
    Schedule,
    StageTimes,
    TrainSchedule,
    build,
    check,
    gpipe,
    interleaved,
    live_activations,
    one_f_one_b,
    problems,
    schedule_of,
    simulate,
    uniform_times,
    with_communication,
    zero_bubble_h1,
    zero_bubble_v,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 16)]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_is_right_with_and_without_written_messages(name):
    for p, m in SIZES:
        if name == "interleaved" and m % p:
            continue
        plan = build(name, p, m)
        assert problems(plan) == []
        written = with_communication(plan)
        assert problems(written) == []
        assert written.without_communication() == plan
        assert Schedule.parse(str(written)) == written


def length(plan, f=1.0, i=1.0, w=1.0):
    return simulate(plan, (StageTimes(f, i, w),) * plan.stages).length


@pytest.mark.parametrize("p, m", [(2, 8), (4, 8), (8, 16)])
def test_bubbles_are_those_of_the_formulas(p, m):
    f, i, w = 3.0, 4.0, 2.0
    work = m * (f + i + w)
    assert length(gpipe(p, m), f, i, w) == pytest.approx(work + (p - 1) * (f + i + w))
    assert length(one_f_one_b(p, m), f, i, w) == pytest.approx(work + (p - 1) * (f + i + w))
    for v in (2, 3):
        whole = (f + i + w) / v
        assert length(interleaved(p, m, v), f / v, i / v, w / v) == pytest.approx(m * v * whole + (p - 1) * whole)
    assert length(zero_bubble_h1(p, m)) == pytest.approx(3 * m + (p - 1))
    assert length(zero_bubble_v(p, m)) <= 6 * m + 2 * (p - 1)  # stages of half the size


@pytest.mark.parametrize("p, m", SIZES)
def test_activations_kept(p, m):
    assert live_activations(one_f_one_b(p, m)) == tuple(min(p - s, m) for s in range(p))
    assert live_activations(gpipe(p, m)) == (m,) * p
    assert max(live_activations(zero_bubble_h1(p, m))) <= min(p, m)
    assert max(live_activations(zero_bubble_v(p, m))) <= 2 * min(p, m)  # of half the size


def test_zero_bubble_cuts_the_bubble_to_a_third_at_the_memory_of_1f1b():
    base, zb = one_f_one_b(8, 16), zero_bubble_h1(8, 16)
    assert (length(zb) - 48) / (length(base) - 48) <= 0.36
    check(zb, max_live=max(live_activations(base)))


@pytest.mark.parametrize("p, m", SIZES)
def test_documented_instruction_streams(p, m):
    train = schedule_of(TrainSchedule, m, p)
    assert problems(train) == []
    assert train.without_communication().actions == one_f_one_b(p, m).actions
    infer = schedule_of(InferenceSchedule, m, p)
    assert problems(infer) == []
    for stage in range(p):
        ticks = list(TrainSchedule(m, p, stage))
        assert len(ticks) == 2 * (m + p - 1)
        assert [i.name for i in ticks[-1][-3:]] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        assert TrainSchedule(m, p, stage).num_pipe_buffers() == max(2, min(p - stage, m))
        assert len(list(InferenceSchedule(m, p, stage))) == m + p - 1


def test_train_stream_golden():
    ticks = [repr(commands) for commands in TrainSchedule(micro_batches=2, stages=2, stage_id=1)]
    assert ticks == [
        "[]",
        "[RecvActivation(buffer_id=0), LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]",
        "[BackwardPass(buffer_id=0)]",
        "[SendGrad(buffer_id=0), RecvActivation(buffer_id=1), LoadMicroBatch(buffer_id=1), ForwardPass(buffer_id=1)]",
        "[BackwardPass(buffer_id=1)]",
        "[SendGrad(buffer_id=1), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]",
    ]


def bad(rows, *, m=1, ranks=(0, 1)):
    return problems(Schedule.of("own", m, ranks, [row.split() for row in rows]))


@pytest.mark.parametrize(
    "rows, m, says",
    [
        (["0F0 0B0", "1F0"], 1, "1B0 is missing"),
        (["0F0", "1F0 1B0"], 1, "0B0 is missing"),
        (["0F0 0B0 0B0", "1F0 1B0"], 1, "0B0 appears 2 times"),
        (["0B0 0F0", "1F0 1B0"], 1, "0B0 comes before 0F0"),
        (["0F0 0I0", "1F0 1B0"], 1, "0W0 is missing"),
        (["0F0 0B0 0W0", "1F0 1B0"], 1, "B together with I or W"),
        (["0F0 0B0 1F0", "1B0"], 1, "stage 1 is on rank 1"),
        (["0F0 0B0", "1F0 1B0 1F7"], 1, "the micro-batches are 0..0"),
        (["0F0 0B0 2F0", "1F0 1B0"], 1, "the stages are 0..1"),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"], 1, "0SEND_F0 has no receive"),
        (["0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], 1, "1RECV_F0 has no send"),
        (["0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"], 1, "0B0 comes before 0RECV_B0"),
        (["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], 1, "0SEND_F0 comes before 0F0"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"], 2, "never ends"),
        (
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
            ],
            2,
            "deadlock without buffering",
        ),
    ],
)  # fmt: skip
def test_planted_faults_are_named(rows, m, says):
    found = bad(rows, m=m)
    assert any(says in text for text in found), found


def test_memory_limit_and_holes_are_named():
    with pytest.raises(ScheduleError, match=r"rank 0 keeps the activations of 8 micro-batches, the limit is 4"):
        check(gpipe(2, 8), max_live=4)
    assert any("rank 1 holds no stage" in t for t in bad(["0F0 0B0 1F0 1B0", ""], ranks=(0, 0)))


@pytest.mark.parametrize(
    "text, says",
    [
        ("micro_batches: 1\nstage_ranks: 0\nrank 0: 0F0", "no line 'schedule'"),
        ("schedule: x\nmicro_batches: 1\nstage_ranks: 0\nrank 0: 0X0", "line 4: action: got '0X0'"),
        ("schedule: x\nmicro_batches: 1\nstage_ranks: 0\nrank 1: 0F0", "ranks: got"),
        ("schedule: x\nmicro_batches: one\nstage_ranks: 0\nrank 0: 0F0", "whole numbers"),
        ("nonsense", "line 1"),
        ("schedule: x\nmicro_batches: 1\nstage_ranks: 0\nrank 0: 0F0\nrank 0: 0F0", "given twice"),
    ],
)
def test_text_that_is_no_schedule(text, says):
    with pytest.raises(ScheduleError, match=says):
        Schedule.parse(text)


def test_arguments_are_checked():
    with pytest.raises(ScheduleError, match="multiple of 4"):
        interleaved(4, 6)
    with pytest.raises(ScheduleError, match="expected one of gpipe"):
        build("2f2b", 2, 2)
    with pytest.raises(ScheduleError, match="chunks=3"):
        build("zbv", 2, 2, 3)
    with pytest.raises(ScheduleError, match="micro_batches"):
        build("1f1b", 2, 0)
    with pytest.raises(ScheduleError, match="expected one for each of 2 stages"):
        simulate(one_f_one_b(2, 2), uniform_times(3))
    assert Action.parse("12SEND_B3") == Action.parse(str(Action.parse("12SEND_B3")))


def test_each_pair_of_neighbouring_stages_may_have_its_own_latency():
    times, plan = uniform_times(3), build("1f1b", 3, 4)
    assert simulate(plan, times, latency=0.5) == simulate(plan, times, latency=[0.5, 0.5])
    near, far = (simulate(plan, times, latency=delays).length for delays in ([0.5, 0.0], [0.5, 3.0]))
    assert simulate(plan, times).length < near < far
    with pytest.raises(ScheduleError, match=r"latency: got 1, expected one for each of 2"):
        simulate(plan, times, latency=[1.0])
