"""torch.cuda's random state: the generators of the devices, and the functions over them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from . import native
from .streams import index_of


class Generator:
    """One entry of torch.cuda.default_generators, over the native generator of a device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)

    def get_state(self) -> torch.Tensor:
        """16 bytes: seed and offset."""
        return torch.ops.simcuda.rng_get(self.index)

    def set_state(self, state: torch.Tensor) -> Generator:
        """Sets what `get_state` gave."""
        torch.ops.simcuda.rng_set(self.index, state.cpu())
        return self

    def manual_seed(self, seed: int) -> Generator:
        """Sets the seed, and the offset to 0."""
        torch.ops.simcuda.rng_seed(self.index, seed if seed < 1 << 63 else seed - (1 << 64))
        return self

    def initial_seed(self) -> int:
        """The seed."""
        return torch.ops.simcuda.rng_initial_seed(self.index) & ((1 << 64) - 1)

    def seed(self) -> int:
        """Sets a seed from the system's randomness, and returns it."""
        seed = int.from_bytes(os.urandom(8), "little")
        self.manual_seed(seed)
        return seed

    def get_offset(self) -> int:
        """The position in the sequence."""
        return int(self.get_state().view(torch.int64)[1])

    def set_offset(self, offset: int) -> None:
        """Sets the place in the sequence."""
        state = self.get_state().view(torch.int64)
        state[1] = offset
        self.set_state(state.view(torch.uint8))


def random_functions(generators: tuple[Generator, ...]) -> dict[str, Any]:
    """The functions of torch.cuda.random, by name."""

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return generators[index_of(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        generators[index_of(device)].set_state(state)

    def get_rng_state_all() -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators]

    def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(generators, states):
            generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generators[native.lib.sim_get_device()].manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    def initial_seed() -> int:
        return generators[native.lib.sim_get_device()].initial_seed()

    def seed() -> None:
        generators[native.lib.sim_get_device()].seed()

    def seed_all() -> None:
        seed()
        for generator in generators:
            generator.manual_seed(initial_seed())

    functions = (get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all)
    functions += (manual_seed, manual_seed_all, initial_seed, seed, seed_all)
    return {function.__name__: function for function in functions}
