"""The planner tells classes of memory apart by the module that asks for it, so each module of its table must exist."""

from importlib.util import find_spec

import pytest
from dsx_plan import owners


@pytest.mark.parametrize(("module", "kind"), owners._OWNERS)
def test_memory_belongs_to_the_module_that_asks(module, kind):
    assert find_spec(module) is not None
    scope = {"__name__": f"{module}.inner", "ask": lambda: owners.who_asked()}
    exec("def make():\n    return ask()", scope)
    assert scope["make"]() == (kind, False)


@pytest.mark.parametrize("module", owners._ALLOCATOR_MODULES)
def test_modules_that_allocate_for_their_callers_exist(module):
    assert find_spec(module) is not None
