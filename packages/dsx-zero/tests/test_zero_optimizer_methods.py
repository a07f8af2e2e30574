"""How many methods and properties `ZeroOptimizer` has, those of base classes of ours included.

The limit is what is reached today: a method more is a thing more that everybody who reads the class has to read.
"""

import inspect

from dsx_zero import ZeroOptimizer


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
