"""How many methods and properties `ZeroOptimizer` has, those of base classes of ours included, and `Gradients`.

The limits are what is reached today: a method more is a thing more that everybody who reads the class has to read.
"""

import inspect

from dsx_zero import ZeroOptimizer
from dsx_zero.grads.gradients import Gradients
from dsx_zero.grads.local import NoReductions
from dsx_zero.grads.reductions import Reductions

CALLBACKS = {"on_forward", "begin_backward", "end_backward"}


def test_the_class_has_few_methods():
    ours = [kind for kind in ZeroOptimizer.__mro__ if kind.__module__.startswith("dsx")]
    found = {
        name
        for kind in ours
        for name, value in vars(kind).items()
        if inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
    }
    assert {"step", "param_groups", "state_dict"} <= found
    assert len(found) <= 41, sorted(found)


def _public(kind):
    return {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}


def test_gradients_are_asked_for_few_things():
    found = _public(Gradients) - CALLBACKS
    assert {"finish", "clear"} <= found
    assert len(found) <= 9, sorted(found)


def test_one_rank_has_what_reductions_are_asked_for():
    """Names and parameters alike, but for those that only the order of several ranks and the backward hooks use."""
    elsewhere = {"run_reduce", "of"}
    assert _public(Reductions) - _public(NoReductions) == elsewhere
    for name in _public(Reductions) - elsewhere:
        theirs, own = (inspect.signature(getattr(kind, name)).parameters for kind in (Reductions, NoReductions))
        assert list(theirs) == list(own), name
