"""What scripts keep in `client_state` comes back as it was, type included; what is no data is refused at once."""

import argparse
import datetime
import pathlib

import numpy
import pytest
import torch
from dsx_checkpoint import CheckpointArgumentError, CheckpointCorruptError, load, open_checkpoint, save
from dsx_checkpoint.encode import decode, encode
from dsx_checkpoint.ranks import Solo
from torch import nn


class Nothing:
    """An optimizer without parameters."""

    def slices(self):
        return ()

    def read_slices(self, reader):
        return self

    def install(self):
        pass


def through_a_checkpoint(folder, state):
    save(folder, "t", module=nn.Module(), slices=[], state=state, ranks=Solo())
    return load(folder, module=nn.Module(), optimizer=Nothing(), ranks=Solo()).state


def same(got, expected):
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, (torch.Tensor, numpy.ndarray)):
        assert got.dtype == expected.dtype and got.shape == expected.shape and got.tolist() == expected.tolist()
    elif isinstance(expected, dict):
        assert [(type(k), k) for k in got] == [(type(k), k) for k in expected]
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, argparse.Namespace):
        same(vars(got), vars(expected))
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            same(one, other)
    else:
        assert got == expected or (got != got and expected != expected)


ARGS = argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), dtype=torch.bfloat16, out=pathlib.Path("a/b"), seeds=[1, None])
VALUES = {
    "numpy float32": numpy.float32(1.1),
    "numpy float64": numpy.float64("nan"),
    "numpy int64": numpy.int64(-5),
    "numpy uint64": numpy.uint64(2**64 - 1),
    "numpy bool": numpy.bool_(True),
    "numpy str": numpy.str_("x"),
    "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
    "array of bool": numpy.array([True, False]),
    "array, big endian": numpy.arange(3, dtype=">f4").astype("=f4"),
    "array, transposed": numpy.arange(6.0).reshape(2, 3).T,
    "array, no dimension": numpy.array(2.5),
    "array, unsigned": numpy.array([2**32 - 1], dtype=numpy.uint32),
    "Namespace": ARGS,
    "dtype": torch.float8_e5m2,
    "device": torch.device("cuda", 1),
    "complex tensor": torch.tensor([1 + 2j]),
    "unsigned tensor": torch.tensor([2**16 - 1], dtype=torch.uint16),
    "scalar tensor": torch.tensor(3),
    "odd keys": {1: "a", None: "b", (1, "x"): "c", "__tensor__": "d", "a.b": torch.ones(1), "a": {"b": torch.zeros(2)}},
    "long key": {"k" * 1000 + "1": torch.ones(1), "k" * 1000 + "2": torch.zeros(1)},
    "numbers": [True, 1, 10**30, 1.0, float("-inf"), float("nan"), None, ""],
    "torch random state": torch.get_rng_state()[:20],
    "numpy random state": numpy.random.RandomState(3).get_state(legacy=False),
}


def test_values_come_back_as_they_were(tmp_path):
    got = through_a_checkpoint(tmp_path, VALUES)
    assert list(got) == list(VALUES)
    for name, value in VALUES.items():
        same(got[name], value)


def test_what_is_saved_is_as_it_was_when_save_was_called(tmp_path):
    array = numpy.ones(3)
    tensors = {}
    encode({"a": array}, "state", tensors)
    array[:] = 2
    assert tensors["state.a"].tolist() == [1, 1, 1]


class Custom:
    """A class of a script."""


REFUSED = {
    "set": {1},
    "bytes": b"x",
    "function": print,
    "class": Custom,
    "object": Custom(),
    "generator": torch.Generator(),
    "date": datetime.date(2020, 1, 1),
    "numpy date": numpy.datetime64("2020-01-01"),
    "longdouble": numpy.longdouble(1),
    "array of objects": numpy.array([None, 1]),
    "array of text": numpy.array(["a"]),
    "complex128": torch.zeros(1, dtype=torch.complex128),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_data_is_refused_by_name(tmp_path, name):
    with pytest.raises(CheckpointArgumentError, match=r"state\.inner\.0"):
        save(tmp_path, "t", module=nn.Module(), slices=[], state={"inner": [REFUSED[name]]}, ranks=Solo())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damaged",
    [
        {"__tensor__": "gone"}, {"__tensor__": 3}, {"__tensor__": "t", "more": 1}, {"__what__": 1}, {"__tuple__": 3},
        {"__items__": [[1]]}, {"__items__": [[[], 1]]}, {"__float__": "x"}, {"__float__": 1},
        {"__numpy__": ["nonsense", 1]},
        {"__numpy__": ["float32"]}, {"__dtype__": "load"}, {"__dtype__": "no"}, {"__device__": "tpu9"},
        {"__namespace__": [1]},
    ],
)  # fmt: skip
def test_what_no_state_encodes_to_is_damage(damaged):
    def tensor(name):
        if name != "t":
            raise CheckpointCorruptError(f"no tensor {name}")
        return torch.zeros(1)

    with pytest.raises(CheckpointCorruptError):
        decode({"a": [damaged]}, tensor)


def test_a_state_that_contains_itself_is_refused(tmp_path):
    state = {"list": []}
    state["list"].append(state["list"])
    with pytest.raises(RuntimeError, match="recursion"):
        save(tmp_path, "t", module=nn.Module(), slices=[], state=state, ranks=Solo())
    assert not list(tmp_path.iterdir())


def test_the_files_stay_readable_without_dsx(tmp_path):
    from safetensors import safe_open

    through_a_checkpoint(tmp_path, {"t": torch.arange(3)})
    with safe_open(open_checkpoint(tmp_path).folder / "client.safetensors", "pt") as file:
        assert file.get_tensor("state.t").tolist() == [0, 1, 2]
