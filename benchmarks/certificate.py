"""How far plans may be from the best, and whether the balances of others are ever faster in the same replay.

    python -m benchmarks.certificate --json results/benchmarks/certificate.json

Planned are the papers' models, as in each row of their tables of speed, on P40s; ten models of torchvision on A100s;
and 200 generated models with skips and uneven layers, for some of which memory is scarce. Nothing is timed: seconds are
predicted. Others choose a balance for all devices, and have a fixed number of micro-batches, four for each device; each
is given the checkpoint mode that is fastest of those that fit.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from benchmarks.generated import generate
from benchmarks.harness import Found, by_case, command, keep, render, start
from reproduce.experiments import EXPERIMENTS
from reproduce.models.counted import ALIKE, counted
from reproduce.models.resnet import ZOO, layers_of
from reproduce.predict.rows import SPEED_TABLES
from reproduce.records.record import Record, Result
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan import Impossible, load_hardware
from torchgpipe.plan.count import count
from torchgpipe.plan.headroom import room
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.optimizer import Optimizer, optimizer_named
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.search import MODES, search
from torchgpipe.plan.trial import Candidate, assess

__all__ = ["Case", "compared", "generated", "table"]

GENERATED = 200
OTHERS = ("equal layers", "equal parameters", "by time")


@dataclass(frozen=True)
class Case:
    """A model to plan, and how it is trained on what."""

    predictor: Predictor
    batch_size: int
    devices: int
    memory: float
    """What tensors may take of each device."""
    optimizer: Optimizer

    def setup(self, balance: Sequence[int]) -> Setup:
        """Return the plain setup with this balance: a single micro-batch, nothing recomputed."""
        return Setup(self.batch_size, tuple(balance), 1, "never", self.optimizer)


def papers() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the papers' models, with the numbers of devices and the batch sizes of their tables."""
    hardware = load_hardware("p40x8")

    def case(model: str, sizes: tuple[int, ...], shape: tuple[int, ...], batch_size: int, devices: int) -> Case:
        predictor = Predictor(counted(model, sizes, shape), hardware)
        return Case(
            predictor, batch_size, devices, room(hardware.memory, hardware), optimizer_named("sgd", foreach=True)
        )

    for name in SPEED_TABLES:
        for row in EXPERIMENTS[name].scales[0].rows:
            if row.published:
                given = row.model, row.size, row.input_shape, row.batch_size, row.devices
                yield f"{row.model} {row.name}", functools.partial(case, *given)


def zoo() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield models of torchvision, for images of 224 pixels."""
    hardware = load_hardware("a100x8")

    def case(name: str) -> Case:
        with torch.device("meta"):
            layers, sample = layers_of(name, 224), torch.empty(2, 3, 224, 224)
        predictor = Predictor(count(layers, sample, alike=ALIKE), hardware)
        return Case(
            predictor, 512, hardware.devices, room(hardware.memory, hardware), optimizer_named("sgd", foreach=True)
        )

    for name in ZOO:
        yield name, functools.partial(case, name)


def generated(number: int = GENERATED) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield generated models; for some, memory is a share of what the model needs on a single device."""

    def case(seed: int) -> Case:
        made = generate(seed, layers=(10, 60))
        predictor = Predictor(count(made.module, made.sample), load_hardware(made.hardware))
        devices = min(made.devices, len(made.module))
        free = Case(predictor, made.batch_size, devices, float("inf"), optimizer_named(made.optimizer, foreach=True))
        if made.room is None:
            return free
        (whole,) = setup_memory(predictor.counts, free.setup([len(made.module)]))
        return Case(predictor, made.batch_size, devices, made.room * whole.peak, free.optimizer)

    for seed in range(number):
        yield f"{seed}", functools.partial(case, seed)


SETS = {"papers": papers, "zoo": zoo, "generated": generated}


def compared(case: Case) -> dict[str, dict[str, float]]:
    """Return the values of the plan, and those of others; nothing for what has no room."""
    found: dict[str, dict[str, float]] = {name: {} for name in ("plan", *OTHERS)}
    try:
        plans = search(
            case.predictor,
            batch_size=case.batch_size,
            memory=case.memory,
            partitions=range(1, case.devices + 1),
            optimizer=case.optimizer,
        ).values()
        bound, seconds = min(each.bound for each in plans), min(each.limit for each in plans)
        found["plan"] = {"seconds": seconds, "bound": bound}
    except Impossible:
        pass
    m = min(4 * case.devices, case.batch_size)
    layers = case.predictor.layers(-(-case.batch_size // m))
    costs: dict[str, Sequence[float]] = {
        "equal layers": [1.0] * len(case.predictor.counts),
        "equal parameters": [layer.parameters for layer in layers.layers],
        "by time": [f + b for f, b in zip(layers.graph, layers.backward, strict=True)],
    }
    for name in OTHERS:
        balance = minimise_heaviest(costs[name], min(case.devices, len(case.predictor.counts)))
        if (best := fastest(case, balance, m)) is not None:
            found[name] = {"seconds": best.seconds}
    return found


def fastest(case: Case, balance: Sequence[int], m: int) -> Candidate | None:
    """Return the balance with the checkpoint mode that is fastest of those that fit."""
    setups = [Setup(case.batch_size, tuple(balance), m, mode, case.optimizer) for mode in MODES]
    fitting = [each for each in (assess(case.predictor, setup) for setup in setups) if each.peak <= case.memory]
    return min(fitting, key=lambda each: each.seconds, default=None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, compare and print a table."""
    options = command("certificate", __doc__).parse_args(arguments)
    units = {"seconds": "s of a step", "bound": "s that no setup can beat"}
    record = start(options, "certificate", "plans, what none can beat, and others", units, devices=1, device="meta")
    total = sum(len(list(made())) for made in SETS.values())
    keep(replace(record, kind="predicted"), options.json, plans(), total, table)


def plans() -> Found:
    """Yield the results of each case."""
    for name, made in SETS.items():
        for title, build in made():
            case = build()
            on, found = case.predictor.hardware.name, compared(case)
            yield [
                Result(f"{name}, {title}", way, "predicted", hardware=on, values=dict(values))
                if values
                else Result(f"{name}, {title}", way, "out of memory")
                for way, values in found.items()
            ]


def table(record: Record, style: str = "simple") -> str:
    """Render for each set how far plans may be from the best, and how they compare with others."""
    rows = []
    cases = by_case(record)
    for name in SETS:
        ways = [case for title, case in cases.items() if title.startswith(f"{name}, ") and case["plan"].values]
        if not ways:
            continue
        gaps = [each["plan"].values["seconds"] / each["plan"].values["bound"] - 1 for each in ways]
        ratios = [
            [case[other].values["seconds"] / case["plan"].values["seconds"] for case in ways if case[other].values]
            for other in OTHERS
        ]
        row = [name, str(len(ways)), *(f"{sum(gap <= most for gap in gaps) / len(gaps):.0%}" for most in (0.01, 0.05))]
        row += [f"{statistics.median(gaps):.2%}", f"{max(gaps):.1%}"]
        row += [f"{statistics.median(each):.2f} ({len(ways) - len(each)})" if each else "none fits" for each in ratios]
        # Equal but for rounding, where the plan is the same balance.
        rows.append([*row, str(sum(ratio < 1 - 1e-9 for each in ratios for ratio in each))])
    headers = ["models", "plans", "gap within 1 %", "within 5 %", "median gap", "largest"]
    return render([*headers, *OTHERS, "faster than the plan"], rows, style)


if __name__ == "__main__":
    main()
