"""A model that is given a new layout goes on with the errors of its quantised gradients, and with the count towards
forgetting them: element by element what they were, whichever rank of a node has them now.
"""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import Nodes, run_ranks, tiny

FEEDBACK = {
    "zero_quantized_gradients": True,
    "zero_quantized_gradients_bits": 2,
    "zero_quantized_error_feedback": True,
}
LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 5}}
COUNT = "gradient_error_count@all"


def make(config):
    model = tiny.MLP(depth=5)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("layers.2", "layers.4", "layers.3.bias")))
    section = {"stage3_param_persistence_threshold": 0, **config}
    # One optimizer of all parameters, so that those that train later are in it.
    return dsx_zero.shard(model, torch.optim.SGD(list(model.parameters()), lr=0.1), config=section)


def train(model, optimizer, rank, step):
    model.loss(*model.example(3, seed=100 * step + rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def errors(optimizer, world):
    """By key and parameter: what all ranks have, put together; and the counts."""
    mine = [(s.name, s.shape, s.ranges, s.states.get(COUNT)) for s in optimizer.slices()]
    everybody = [None] * world
    dsx_comm.all_gather_object(everybody, mine)
    found, counts = {}, {}
    for slices in everybody:
        for name, shape, ranges, count in slices:
            for key, start, values in ranges:
                whole = found.setdefault((key, name), torch.full((torch.Size(shape).numel(),), float("nan")))
                whole[start : start + values.numel()] = values
            if count is not None:
                counts.setdefault(name, set()).add(count)
    return found, counts


def replanned(rank, world, devices, config):
    with Nodes(world, devices).environment(rank):
        model, optimizer = make(config)
        for step in range(3):
            train(model, optimizer, rank, step)
        before, counts = errors(optimizer, world)
        assert before and any(values.abs().max() > 0 for values in before.values())
        assert not any(values.isnan().any() for values in before.values())
        # Of layer 3 the weight joins the bias, layers 0 and 1 begin; layers 2 and 4 stay as they are.
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        optimizer.replan()
        after, later = errors(optimizer, world)
        assert set(before) < set(after)
        for place, values in before.items():
            assert torch.equal(after[place], values), place
        begun = [values for place, values in after.items() if place not in before]
        assert all(not values.nan_to_num().any() for values in begun)
        if "zeropp_loco_param" in config:
            assert set(counts) and all(found == {3} for found in counts.values())
            assert all(later[name] == {3} for name in counts)
        train(model, optimizer, rank, 3)
        train(model, optimizer, rank, 4)
        if "zeropp_loco_param" in config:  # the fifth message: nothing was to be made up for in it
            _, last = errors(optimizer, world)
            assert all(last[name] == {5} for name in counts) and set().union(*last.values()) <= {2, 5}


@pytest.mark.parametrize(
    ("world", "devices", "config"),
    [
        (4, 2, {**FEEDBACK, "stage": 3}),
        (4, 2, {**LOCO, "stage": 3}),
        (4, 2, {**FEEDBACK, "stage": 2}),
        (2, 1, {**FEEDBACK, "stage": 3}),
        (2, 2, {**LOCO, "stage": 1}),
    ],
    ids=["stage 3", "LoCo at stage 3", "stage 2", "one rank per node", "LoCo at stage 1, one node"],
)
def test_errors_go_along(world, devices, config):
    run_ranks(replanned, world, devices, config, timeout=120)
