"""What happens in an episode of the soak: a short training, and what goes wrong in it, all drawn from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torchgpipe.checkpoint import MODES, Mode

RANKS = 4

Home = Literal["kept processes", "new processes", "torchrun"]
"""Who goes on after a fault: the same processes, others that are forked, or others that torchrun starts."""

Kind = Literal["killed", "stopped", "link cut", "raising", "out of memory", "hanging"]
Place = Literal[
    "loading", "data", "forward", "loss", "before backward", "recomputation", "backward", "clipping", "optimizer",
    "saving", "evaluation",
]  # fmt: skip

KINDS: dict[Home, tuple[Kind, ...]] = {
    "kept processes": ("raising", "out of memory", "hanging"),
    "new processes": ("killed", "stopped", "link cut", "raising", "out of memory", "hanging"),
    "torchrun": ("killed", "raising", "out of memory"),  # torchrun waits half a minute for a process that is stopped
}
PLACES: tuple[Place, ...] = (
    "loading", "data", "forward", "forward", "loss", "before backward", "recomputation", "backward", "backward",
    "clipping", "optimizer", "saving", "saving", "evaluation",
)  # fmt: skip
IN_LAYERS = ("forward", "recomputation", "backward", "evaluation")


class Batch(NamedTuple):
    """A mini-batch, and into how many micro-batches it is to be split."""

    samples: int
    chunks: int

    @property
    def m(self) -> int:
        """How many micro-batches it makes."""
        return -(-self.samples // -(-self.samples // self.chunks))


class Step(NamedTuple):
    """One update of the parameters: its mini-batches, and what is done afterwards."""

    batches: tuple[Batch, ...]
    mode: Mode
    clip: float | None
    evaluation: Batch | None
    saved: bool


class Fault(NamedTuple):
    """Something that goes wrong on a rank, or `slow`: that only takes longer than the silence.

    `share` says in which of the rank's layers, and `skipped` how often the place is passed before. A fault in saving
    comes `after` seconds, or in the first layer whose state is asked for.
    """

    kind: Kind | Literal["slow"]
    place: Place
    step: int
    rank: int
    share: float
    skipped: int
    after: float | None = None


class Attempt(NamedTuple):
    """Training from the last saved state until a fault, or to the end; `slow` is no fault."""

    balance: tuple[int, ...]
    fault: Fault | None
    slow: Fault | None = None


class Episode(NamedTuple):
    """A training of `layers`, by name, on samples of `length` vectors of `width` numbers."""

    number: int
    seed: int
    home: Home
    layers: tuple[str, ...]
    width: int
    length: int
    deferred_batch_norm: bool
    steps: tuple[Step, ...]
    attempts: tuple[Attempt, ...]
    reference: tuple[int, ...]
    silence: float


def draw_episode(seed: int, number: int, silence: float, *, cuts: bool = True) -> Episode:
    """Draw an episode, with `cuts` of links or without."""
    draw = random.Random(f"soak {seed} {number}")
    home: Home = draw.choices(("kept processes", "new processes", "torchrun"), (46, 53, 1))[0]
    dropout, batch_norm, skips = draw.random() < 0.4, draw.random() < 0.5, draw.random() < 0.5
    layers = _layers(draw, dropout, batch_norm, skips)
    steps = [_step(draw) for _ in range(draw.randint(5, 9))]
    worlds = [RANKS]
    faults: list[Fault] = []
    kinds = [kind for kind in KINDS[home] if cuts or kind != "link cut"]
    for step in sorted(draw.sample(range(len(steps)), draw.choice((0, 1, 1, 2, 2, 3)))):
        fault = _fault(draw, kinds, step, worlds[-1], bool(faults))
        faults.append(fault)
        steps[step] = _with(draw, fault, steps[step])
        # Random numbers depend on partitions: with dropout the balance stays.
        worlds.append(RANKS if dropout or home == "torchrun" else draw.choice((2, 3, 4, 4)))
    balances = [_balance(draw, len(layers), n) for n in worlds]
    if dropout or home == "torchrun":
        balances = [balances[0]] * len(balances)
    slow = None
    if draw.random() < 0.08:
        place: Place = draw.choice(("data", "before backward", "forward", "optimizer"))
        slow = Fault("slow", place, 0, draw.randrange(RANKS), draw.random(), 0)
    return Episode(
        number,
        seed,
        home,
        layers,
        width=draw.choice((8, 32, 96)),
        length=draw.choice((3, 16)),
        deferred_batch_norm=batch_norm and draw.random() < 0.5,
        steps=tuple(steps),
        attempts=tuple(
            Attempt(balance, fault, slow if k == 0 else None)
            for k, (balance, fault) in enumerate(zip(balances, [*faults, None], strict=True))
        ),
        reference=balances[0] if dropout else _balance(draw, len(layers), draw.randint(1, RANKS)),
        silence=silence,
    )


def _layers(draw: random.Random, dropout: bool, batch_norm: bool, skips: bool) -> tuple[str, ...]:
    kinds = ["linear", "linear", "residual", "norm", *["dropout"] * dropout, *["batch norm"] * batch_norm]
    layers = ["linear", *(draw.choice(kinds) for _ in range(draw.randint(4, 8))), "linear"]
    for name, present in (("dropout", dropout), ("batch norm", batch_norm)):
        if present and name not in layers:
            layers.insert(draw.randint(1, len(layers)), name)
    if skips:
        for k in range(draw.randint(1, 2)):
            first = draw.randrange(len(layers))
            layers.insert(first + 1, f"stash {k}")
            layers.insert(draw.randint(first + 2, len(layers)), f"pop {k}")
    return tuple(layers)


def _batch(draw: random.Random) -> Batch:
    return Batch(draw.choice((1, 2, 3, 5, 7, 8, 13, 16)), draw.choice((1, 2, 3, 4, 8)))


def _step(draw: random.Random) -> Step:
    return Step(
        batches=tuple(_batch(draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))),
        mode=draw.choice(MODES),
        clip=draw.choice((None, 0.1, 1.0)),
        evaluation=_batch(draw) if draw.random() < 0.3 else None,
        saved=draw.random() < 0.5,
    )


def _fault(draw: random.Random, kinds: Sequence[Kind], step: int, n: int, again: bool) -> Fault:
    kind = draw.choice(kinds)
    places = [
        place
        for place in PLACES
        if (place != "loading" or again) and (kind != "hanging" or place in (*IN_LAYERS, "loss"))
    ]
    place = draw.choice(places)
    by_time = place == "saving" and kind in ("killed", "stopped") and draw.random() < 0.7
    return Fault(
        kind,
        place,
        step,
        rank=n - 1 if place == "loss" else draw.randrange(n),
        share=draw.random(),
        skipped=draw.randrange(8),
        after=draw.choice((0.001, 0.005, 0.02, 0.05)) * draw.random() if by_time else None,
    )


def _with(draw: random.Random, fault: Fault, step: Step) -> Step:
    """Return the step with what the fault's place takes."""
    if fault.place == "recomputation":
        return step._replace(mode="always")
    if fault.place == "evaluation" and step.evaluation is None:
        return step._replace(evaluation=_batch(draw))
    if fault.place == "saving":
        return step._replace(saved=True)
    if fault.place == "clipping" and step.clip is None:
        return step._replace(clip=1.0)
    return step


def _balance(draw: random.Random, layers: int, n: int) -> tuple[int, ...]:
    ends = [0, *sorted(draw.sample(range(1, layers), n - 1)), layers]
    return tuple(b - a for a, b in itertools.pairwise(ends))
