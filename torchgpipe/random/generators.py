"""Find random number generators; read, compare and set their states."""

from collections.abc import Iterable, Mapping, Sequence
from ctypes import string_at

import torch
from torch import Tensor, nn

UNLIKE = (
    "a recomputation drew more or fewer random numbers than its first pass: a layer draws "
    "otherwise in it, or another thread drew from the same generator; give that thread a "
    "torch.Generator of its own"
)

SEED_STEP = 0x9E3779B97F4A7C15
"""A large odd number, so that the seeds of GPUs are far apart from each other."""

State = Tensor | tuple[int, int]
"""The state of a generator; on a GPU the seed and the offset.

Seed and offset can be read without waiting for the GPU.
"""


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers on `device` draw from by default."""
    if device.type in ("cpu", "meta"):
        return [torch.default_generator]
    return [
        torch.default_generator,
        torch.get_device_module(device).default_generators[device.index],
    ]


def seed_apart(numbers: Mapping[torch.device, int]) -> None:
    """Give GPUs different seeds if they have the same seed, as after `torch.manual_seed`.

    Otherwise, the layers on all GPUs would draw the same numbers, such as equal dropout masks in
    different partitions. The pipeline's first device keeps its seed, and so does a GPU that has
    been given a seed of its own.

    Args:
        numbers: For each GPU that this process uses, its number among the pipeline's devices.
    """
    if not any(numbers.values()):
        return
    taken = {torch.initial_seed()}
    for device, number in sorted(numbers.items(), key=lambda each: each[1]):
        generator = default_generators(device)[-1]
        seed = generator.initial_seed()
        if number and seed in taken:
            before = state_of(generator)
            while seed in taken:
                seed = (seed + SEED_STEP * number) % 2**63
            generator.manual_seed(seed)
            if not isinstance(before, Tensor):  # go on where the generator was
                generator.set_offset(before[1])
        taken.add(generator.initial_seed())


def own_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Return all `torch.Generator` objects that are attributes of the given modules."""
    found: list[torch.Generator] = []
    for module in modules:
        found += [value for value in module.__dict__.values() if type(value) is torch.Generator]
    return found


def check_apart(generators: Iterable[Sequence[torch.Generator]]) -> None:
    """Raise `RuntimeError` if two partitions share a generator.

    Args:
        generators: For each partition, the generators that are attributes of its layers.
    """
    distinct: list[torch.Generator] = []
    for own in generators:
        distinct += set(own)
    if len(set(distinct)) < len(distinct):
        raise RuntimeError(
            "several partitions draw from the same torch.Generator, so they would draw in another "
            "order than layers without a pipeline; give each layer its own generator"
        )


def state_of(g: torch.Generator) -> State:
    """Return a generator's state now."""
    return g.get_state() if g.device.type == "cpu" else (g.initial_seed(), g.get_offset())


def same(a: State, b: State) -> bool:
    """Return whether two states of a generator are equal.

    This function calls no tensor operator, because modes and profilers would count the operator as
    part of a task.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return string_at(a.data_ptr(), a.nbytes) == string_at(b.data_ptr(), b.nbytes)
    return a == b


def set_all(generators: Sequence[torch.Generator], states: Sequence[State]) -> None:
    """Set each generator to its state."""
    for g, state in zip(generators, states, strict=True):
        if isinstance(state, Tensor):
            g.set_state(state)
        else:
            g.manual_seed(state[0])
            g.set_offset(state[1])
