"""Find the largest model that fits in memory, for `python -m reproduce plan --largest`.

As in the papers, the largest model is found twice: for naive model parallelism and for a pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import nn

from reproduce.models.built import titled
from torchgpipe.caught import how_many
from torchgpipe.plan import Hardware, Impossible
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.hardware.amount import amount
from torchgpipe.plan.precision import check_precision, precision_of
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.search.impossible import least
from torchgpipe.plan.search.search import Aim, search
from torchgpipe.plan.search.trial import Choices
from torchgpipe.schedules import make

Sizes = tuple[int, ...]


class Family(NamedTuple):
    """Models that differ only in their sizes.

    Attributes:
        name: The name of the models.
        names: The names of the sizes.
        sizes: The sizes with which the search starts.
        steps: For each size, a number of which the size must be a multiple.
        most: For each size, the largest value that is tried.
        build: A function that gets sizes, and builds the model with these sizes on `meta`.
        counts: A function that gets sizes, and counts the operations and bytes of the layers of the
            model with these sizes.
        most_layers: The search ends as soon as a model with at least this number of layers fits.
    """

    name: str
    names: Sequence[str]
    sizes: Sizes
    steps: Sizes
    most: Sizes
    build: Callable[[Sizes], nn.Module]
    counts: Callable[[Sizes], Counts]
    most_layers: float = inf


@dataclass(frozen=True)
class Asked:
    """The model, training options and devices for which the largest sizes are searched.

    If `autocast` is given, the search has to run with CUDA autocast enabled for this type, because
    the counts of operations and bytes depend on it.
    """

    family: Family
    sizes: Sizes
    batch_size: int
    devices: int
    memory: float  # the bytes that each device has for tensors
    optimizer: str
    hardware: Hardware
    schedules: Sequence[str] = ("GPipe",)  # the pipeline may have any of these
    autocast: torch.dtype | None = None
    master_weights: bool = False


class Tried(NamedTuple):
    """A size that was tried, and the bytes that the fullest device needs with this size.

    `steps` is the size, divided by the number of which it must be a multiple (`Family.steps`).
    """

    steps: int
    needed: float


def largest(
    asked: Asked,
    axis: int,
    start: Sequence[Sizes],
    needed: Callable[[Sizes], float],
    layers: Callable[[Sizes], int] = lambda _: 0,
) -> tuple[Sizes | None, Sizes | None]:
    """Search for the largest model that fits, by changing the size with index `axis`.

    It takes long to try a large model. So the search guesses at which size the memory is full, from
    the bytes of two tries and as if the bytes grew linearly with the size.

    1. Let this size grow until the model does not fit.
    2. Try sizes between the largest one that fits and the smallest one that does not.

    Args:
        asked: The model and the devices.
        axis: The index of the size that grows.
        start: The sizes to begin with: the search tries them in turn, as long as they fit.
        needed: A function that returns how many bytes a model of the given sizes needs on the
            fullest device. The model fits if these are at most `asked.memory`.
        layers: A function that returns how many layers a model of the given sizes has. It is called
            only for models that fit.

    Returns:
        - The largest sizes that fit, or None if no size fits.
        - The next larger sizes, which do not fit, or None if all tried sizes fit.
    """
    family = asked.family
    most = family.most[axis] // family.steps[axis]

    def sizes(steps: int) -> Sizes:
        changed = list(asked.sizes)
        changed[axis] = steps * family.steps[axis]
        return tuple(changed)

    def tried(steps: int) -> Tried:
        return Tried(steps, needed(sizes(steps)))

    first = [max(1, each[axis] // family.steps[axis]) for each in start]
    fits = Tried(0, 0.0)
    last = tried(first.pop(0))
    added = 1  # the search adds at least so many steps
    while last.needed <= asked.memory:
        before, fits = fits, last
        count = layers(sizes(fits.steps))
        if fits.steps >= most or count >= family.most_layers:
            return sizes(fits.steps), None
        if first:
            last = tried(first.pop(0))
            continue
        times = 4 if 4 * count <= family.most_layers else 2
        guess = min(_steps_until_full(before, fits, asked.memory), times * fits.steps)
        if guess < fits.steps + added:
            guess = fits.steps + added
            added *= 2  # so that many wrong guesses do not make the search slow
        last = tried(int(min(guess, most)))
    too_large = last
    guesses = 0
    while too_large.steps - fits.steps > 1:
        guesses += 1
        middle = (fits.steps + too_large.steps) // 2
        # A guess is mostly right. Where guesses are wrong, each second try halves the range.
        if guesses % 2:
            guess = _steps_until_full(fits, too_large, asked.memory)
            middle = int(min(max(guess, fits.steps + 1), too_large.steps - 1))
        last = tried(middle)
        if last.needed <= asked.memory:
            fits = last
        else:
            too_large = last
    return sizes(fits.steps) if fits.steps else None, sizes(too_large.steps)


def _steps_until_full(smaller: Tried, larger: Tried, memory: float) -> float:
    """Guess from two tries at which whole number of steps (`Tried.steps`) the memory is full.

    The guess is right if the needed bytes grow linearly with the size. It is infinite if they do
    not grow.
    """
    growth = (larger.needed - smaller.needed) / (larger.steps - smaller.steps)
    if growth <= 0:
        return inf
    return smaller.steps + (memory - smaller.needed) // growth


class Largest(NamedTuple):
    """The largest model that fits.

    Attributes:
        how: How it is trained: "naive" or "pipelined".
        sizes: The largest sizes that fit, or None if no size fits.
        beyond: The next larger sizes, which do not fit, or None if all tried sizes fit.
        parameters: The number of the model's parameters; 0 if no size fits.
        needed: How many bytes the fullest device needs; 0 if no size fits.
    """

    how: str
    sizes: Sizes | None
    beyond: Sizes | None
    parameters: int = 0
    needed: float = 0.0


def find_largest(asked: Asked, axis: int, tell: Callable[[str], object]) -> list[Largest]:
    """Find the largest model that fits, for naive model parallelism and for a pipeline.

    Only one of the model's sizes is changed: the size with index `axis`. `tell` is called with a
    text about each size that is tried, and about each result.
    """
    made = []

    def layers(sizes: Sizes) -> int:
        return len(asked.family.counts(sizes))

    start = [asked.sizes]
    for how in ("naive", "pipelined"):
        tried: dict[Sizes, float] = {}
        needed = partial(_told, asked, how, tell, tried)
        sizes, beyond = largest(asked, axis, start, needed, layers)
        if sizes is None:
            made.append(Largest(how, sizes, beyond))
        else:
            parameters = sum(p.numel() for p in asked.family.build(sizes).parameters())
            made.append(Largest(how, sizes, beyond, parameters, tried[sizes]))
            if sizes[axis] > asked.sizes[axis]:
                start.append(sizes)  # a pipeline can mostly train this model, too
        tell(f"  {line_of(asked, made[-1])}")
    return made


def title_of(asked: Asked) -> str:
    """Return a title with the model, the devices and the training options of the search.

    Raise `ValueError` if the precision does not fit the model.
    """
    family, master_weights = asked.family, asked.master_weights
    module = family.build(asked.sizes)
    check_precision(module, asked.autocast, master_weights=master_weights)
    counts = family.counts(asked.sizes)
    precision = precision_of(counts, asked.hardware, asked.autocast, master_weights=master_weights)
    return (
        f"largest {asked.family.name} on {how_many(asked.devices, 'device')} of "
        f"{asked.hardware.name} with {amount(asked.memory)} for tensors, batch size "
        f"{asked.batch_size}, {asked.optimizer}, {precision}, {' or '.join(asked.schedules)}"
    )


def line_of(asked: Asked, found: Largest) -> str:
    """Return a line of text about the largest model that was found (naive or pipelined)."""
    name = asked.family.name
    if found.sizes is None:
        return f"{found.how}: none: not even {titled(name, found.beyond or ())} fits"
    least = "at least " if found.beyond is None else ""
    title = titled(name, found.sizes)
    end = "" if found.beyond else ", where the search ends"
    parameters = f"{found.parameters / 1e6:,.1f} M parameters"
    needed = f"{amount(found.needed)} on the fullest device"
    return f"{found.how}: {least}{title}: {parameters}, {needed}{end}"


def lines_of(asked: Asked, axis: int, found: Sequence[Largest]) -> Iterator[str]:
    """Yield lines of text about the largest models that fit in memory.

    The last lines say which of the model's sizes the search has increased, and for which settings
    (micro-batches and checkpoints) the memory was predicted.
    """
    for each in found:
        yield line_of(asked, each)
    yield (
        f"only {asked.family.names[axis]} grows. naive: one micro-batch, nothing "
        "recomputed; pipelined: micro-batches of one, all but the last recomputed"
    )
    pipelined = found[-1]
    if pipelined.sizes is None and set(asked.schedules) == {"GPipe"}:
        yield (
            "GPipe keeps what all micro-batches need for their backward; 1F1B keeps less: try "
            "--schedules 1F1B"
        )
    yield "predicted bytes allocated to tensors, not measured"


def _told(
    asked: Asked,
    how: str,
    tell: Callable[[str], object],
    tried: dict[Sizes, float],
    sizes: Sizes,
) -> float:
    """Return how many bytes a model needs (`_needed`), and tell the user whether the model fits.

    The result is also stored in `tried`, with the model's sizes as the key.
    """
    title = titled(asked.family.name, sizes)
    tell(f"  {how}: trying {title}")
    needed = tried[sizes] = _needed(asked, how, sizes)
    verdict = "fits" if needed <= asked.memory else "too large"
    if needed < inf:
        verdict = f"needs {amount(needed)} on the fullest device: {verdict}"
    tell(f"  {how}: {title} {verdict}")
    return needed


def _needed(asked: Asked, how: str, sizes: Sizes) -> float:
    """Return how many bytes a model with these sizes needs on the fullest device.

    `how` is the kind of training: "naive" for naive model parallelism, or "pipelined". The result
    is infinite if none of the schedules can run the model's layers.
    """
    counts = asked.family.counts(sizes)
    predictor = Predictor(counts, asked.hardware)
    optimizer = optimizer_named(
        asked.optimizer, foreach=not asked.hardware.cpu, master_weights=asked.master_weights
    )
    if how == "naive":
        each = [Choices(asked.batch_size, optimizer, [1], ["never"])]
    else:
        some = Choices(asked.batch_size, optimizer, [asked.batch_size], ["except_last"])
        each = [some._replace(schedules=[schedule]) for schedule in asked.schedules]
    needed = inf
    for choices in each:
        (schedule,) = choices.schedules
        stages = len(make(schedule, 1, 1).placement)  # on each device
        devices = max(1, min(asked.devices, len(counts) // stages))
        with suppress(Impossible):
            needed = min(needed, least(predictor, devices, choices).peak)
            if needed > asked.memory:
                (found,) = search(predictor, choices, [devices], Aim(asked.memory, close=inf))
                best = found[devices].best
                assert best is not None
                needed = best.peak
        if needed <= asked.memory:
            break
    return needed
