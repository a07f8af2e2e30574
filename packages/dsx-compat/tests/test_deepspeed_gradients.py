"""`deepspeed.runtime.utils.clip_grad_norm_`, `CheckOverflow` and others: all ranks get the norm of the whole model."""

from __future__ import annotations

import math

import dsx_comm
import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks

dsx_compat.activate()


def parameter(values, **marks):
    found = torch.nn.Parameter(torch.zeros(len(values)))
    found.grad = torch.tensor(values)
    for name, value in marks.items():
        setattr(found, name, value)
    return found


def powers(vectors, p):
    """The p-norm of vectors as one, by plain arithmetic in double precision."""
    values = [abs(float(x)) for vector in vectors for x in vector]
    return max(values) if math.isinf(p) else sum(x**p for x in values) ** (1 / p)


DENSE, EXPERTS = [3.0, -4.0], [[1.0, 2.0, 2.0], [6.0, 0.0, -1.0]]


def clip_experts(rank, world, p):
    """Two experts on four ranks: each pair of ranks shares them out."""
    from deepspeed.runtime.utils import clip_grad_norm_
    from deepspeed.utils import groups

    groups._create_expert_and_data_parallel(2)
    dense = parameter(DENSE)
    expert = parameter(EXPERTS[rank % 2], allreduce=False, group_name="ep_size_2")
    unused = torch.nn.Parameter(torch.ones(2))
    norm = clip_grad_norm_((q for q in [dense, expert, unused]), 0.5, norm_type=p)
    assert unused.grad is None
    return float(norm), dense.grad.tolist(), expert.grad.tolist()


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, math.inf])
def test_experts_are_clipped_by_the_norm_of_the_whole_model(p):
    expected = powers([DENSE, *EXPERTS], p)
    for rank, (norm, dense, expert) in enumerate(run_ranks(clip_experts, 4, p)):
        assert norm == pytest.approx(expected, rel=1e-6)
        scale = 0.5 / (expected + 1e-6)
        assert dense == pytest.approx([scale * x for x in DENSE], rel=1e-5)
        assert expert == pytest.approx([scale * x for x in EXPERTS[rank % 2]], rel=1e-5)


def one_expert_without_a_name(rank, world):
    from deepspeed.runtime.utils import CheckOverflow, clip_grad_norm_
    from deepspeed.utils import groups

    expert = parameter([rank + 1.0], allreduce=False)
    with pytest.raises(dsx_comm.errors.TopologyError, match="group_name"):
        clip_grad_norm_([expert], 0.1)
    assert expert.grad.tolist() == [rank + 1.0]
    groups._create_expert_and_data_parallel(2)
    norm = clip_grad_norm_([expert, parameter([2.0])], 10.0)
    broken = parameter([math.inf if rank else 0.0], allreduce=False)
    check = CheckOverflow([[broken]])
    assert check.has_moe_params and check.check() is True
    assert CheckOverflow().check([{"params": [broken]}]) is True  # groups of an optimizer, too
    assert check.has_overflow_serial([broken]) is bool(rank)
    assert check.check([[parameter([1.0], allreduce=False)]]) is False
    assert CheckOverflow().check_using_norm([1.0, -1.0 if rank else 0.0]) is True
    assert CheckOverflow().check_using_norm([torch.tensor(math.nan)], reduce_overflow=False) is True
    return float(norm)


def test_ranks_agree_on_an_overflow_of_one_rank_s_expert():
    assert run_ranks(one_expert_without_a_name, 2) == [pytest.approx(3.0)] * 2


def unaveraged(rank, world):
    from deepspeed.runtime.utils import CheckOverflow, clip_grad_norm_

    own = parameter([1.0 + 6.0 * rank])
    norm = clip_grad_norm_(own, 1.0)  # a single tensor
    broken = parameter([math.nan if rank else 0.0])
    assert CheckOverflow([[broken]]).check() is bool(rank)  # dense and no mpu: this process alone
    assert CheckOverflow([[broken]], zero_reduce_scatter=True).check() is True
    return float(norm), own.grad.item()


def test_gradients_that_were_not_averaged_are_clipped_by_one_factor():
    (first, small), (second, large) = run_ranks(unaveraged, 2)
    assert first == second == pytest.approx(5.0)  # the root of the mean of 1 and 49
    assert (small, large) == pytest.approx((0.2, 1.4), rel=1e-5)


class Slices:
    """An mpu of one data-parallel rank and all ranks as slices."""

    def __init__(self):
        self.all = torch.distributed.group.WORLD
        self.mine = [torch.distributed.new_group([r]) for r in range(2)][torch.distributed.get_rank()]

    def get_model_parallel_group(self):
        return self.all

    def get_data_parallel_group(self):
        return self.mine

    def get_model_parallel_rank(self):
        return torch.distributed.get_rank()

    def get_model_parallel_world_size(self):
        return 2

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1


def over_slices(rank, world):
    from deepspeed.runtime.utils import CheckOverflow, clip_grad_norm_, get_grad_zeros, get_weight_norm
    from deepspeed.utils import groups

    mpu = Slices()
    same, mine = parameter([2.0, 0.0]), parameter([[4.0, 0.0], [5.0, 0.0]][rank], tensor_model_parallel=True)
    assert get_grad_zeros([same, mine], mpu) == 3 and get_grad_zeros([same, mine]) == 2
    norm = clip_grad_norm_([same, mine], 1.0, mpu=mpu)
    with torch.no_grad():
        same.fill_(1.0), mine.fill_(rank + 1.0)
    assert get_weight_norm([same, mine], mpu=mpu) == pytest.approx(math.sqrt(2 * 1 + 2 * 1 + 2 * 4))
    assert get_weight_norm([same, mine], math.inf, mpu) == 2.0
    assert get_weight_norm([parameter([1.0])]) == 0.0 and get_weight_norm(torch.tensor([math.inf])) == -1
    mine.grad[0] = math.inf if rank == 0 else 0.0
    assert CheckOverflow([[same, mine]], mpu=mpu).check() is True
    assert groups._get_data_parallel_world_size() == 2  # the mpu was in use during the calls only
    return float(norm), same.grad.tolist()


def test_slices_of_an_mpu_are_summed_and_copies_count_once():
    expected = math.sqrt(4 + 16 + 25)
    for norm, same in run_ranks(over_slices, 2):
        assert norm == pytest.approx(expected) and same == pytest.approx([2 / expected, 0.0], rel=1e-5)


def through_an_engine(rank, world, stage):
    """`.grad` of a sharded model has no values; its norm is that of the averaged gradients of all ranks."""
    import deepspeed
    from deepspeed.runtime.utils import CheckOverflow, clip_grad_norm_

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    engine.backward(engine(torch.full((1, 3), rank + 1.0)).sum())
    norm = float(clip_grad_norm_(engine.parameters(), 1.0))
    assert CheckOverflow([list(engine.parameters())]).check() is False
    before = [p.clone() for p in _whole(engine)]
    engine.step()
    return norm, [(a - b).norm().item() for a, b in zip(before, _whole(engine))]


def _whole(engine):
    return list(engine.module_state_dict().values())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_an_engine_are_clipped_over_all_ranks(stage):
    expected = math.sqrt(6 * 1.5**2 + 2)  # weights 1.5, biases 1
    for norm, moved in run_ranks(through_an_engine, 2, stage):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert math.hypot(*moved) == pytest.approx(0.1, rel=1e-4)


def test_wrong_arguments_are_refused_before_anything_is_changed():
    from deepspeed.runtime.utils import clip_grad_norm_

    p = parameter([3.0])
    for arguments in ({"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0}):
        with pytest.raises(ValueError, match="expected"):
            clip_grad_norm_([p], **arguments)
    assert p.grad.tolist() == [3.0]
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    assert float(clip_grad_norm_([p], 1.0)) == 3.0 and p.grad.item() == pytest.approx(1.0, rel=1e-5)
