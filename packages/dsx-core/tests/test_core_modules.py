"""What several packages put on one module: hooks vanish in copies, calls nest, and compiled parts are seen through."""

import copy
import functools
import pickle
import subprocess
import sys

import torch
from dsx_core.modules import (
    CALL,
    LEAF_MODULES,
    AroundCall,
    CallingHook,
    CompiledCall,
    block_names,
    is_compiled,
    outside_graphs,
)
from torch import nn


class Doubled(AroundCall):
    def __call__(self, *args):
        return 2 * self.call(*args)


class Compiled(CompiledCall):
    def __init__(self, module):
        self._forward = type(module).forward.__get__(module)

    def __call__(self, *args):
        return self._forward(*args)


def test_calls_nest_and_copies_are_ordinary_modules():
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    seen = []
    module.register_forward_pre_hook(CallingHook(lambda *args: seen.append(1)))
    expected = type(module).forward(module, x)
    first = Doubled(module, None)
    setattr(module, CALL, Doubled(module, first))
    assert torch.equal(module(x), 4 * expected)
    assert seen == [1]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x), expected)
    assert seen == [1]


def test_a_compiled_part_is_seen_through_other_calls():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    setattr(model[0], CALL, Doubled(model[0], None))
    assert not is_compiled(model)
    setattr(model[0], CALL, Doubled(model[0], model[0]._call_impl))
    assert is_compiled(model), "what stood in the slot before is compiled code"
    delattr(model[0], CALL)
    assert not is_compiled(model)
    model[1].forward = Compiled(model[1])
    assert is_compiled(model) and not is_compiled(model[0])


def test_blocks_are_children_of_outermost_lists_and_marked_modules():
    inner = nn.ModuleDict({"deep": nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]), "head": nn.Linear(1, 1)})
    model = nn.ModuleDict({"layers": nn.ModuleList([inner, nn.ReLU()]), "other": copy.deepcopy(inner)})
    assert block_names(model) == ("layers.0", "other.deep.0")
    assert block_names(model, frozenset({"other"})) == ("layers.0", "other")
    LEAF_MODULES.add(model["other"])
    assert block_names(model) == ("layers.0", "other")
    assert block_names(copy.deepcopy(model)) == ("layers.0", "other.deep.0"), "copies have no marks"


def test_the_import_of_modules_loads_no_torch():
    program = "import sys, dsx_core.modules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def graphs_with(mark):
    """The operators of each graph of a compiled model whose hooks compute, and how often the hooks ran traced."""
    traced, graphs = [], []

    def inside(output):
        traced.append(torch.compiler.is_compiling())
        return output.sin()

    def hook(module, args, output):
        inside(inside(output))

    def backend(graph, inputs):
        graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    marked = mark(hook)
    for part in model:
        part.register_forward_hook(marked)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
    torch._dynamo.reset()
    return graphs, set(traced)


def test_what_stays_outside_of_graphs_is_what_torch_would_leave_out():
    expected = graphs_with(torch.compiler.disable)
    assert graphs_with(outside_graphs) == expected == ([["linear"], ["linear"]], {False})
    assert graphs_with(lambda hook: outside_graphs(functools.partial(hook))) == expected
    assert graphs_with(lambda hook: hook) != expected, "this model cannot tell a hook that is traced"


def test_to_stay_outside_of_graphs_imports_no_compiler():
    program = """
import sys, torch
from dsx_core.modules import CallingHook, outside_graphs
assert outside_graphs(lambda x: x + 1)(1) == 2
layer = torch.nn.Linear(2, 2)
layer.register_forward_pre_hook(CallingHook(lambda *args: None))
layer(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
