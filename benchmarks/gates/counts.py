"""Count the operations of a training step, and compare the counts with `counts.json`.

    python -m benchmarks.gates.counts             # exit with 1 if a count differs from the file's
    python -m benchmarks.gates.counts --update    # write the file, if the change is intended

Unlike times, counts are the same in each run. The class `Counts` says what is counted, and
`benchmarks.gates.tally` says how. If a count becomes lower, it also has to be written to the file:
otherwise, nobody would notice if it became as high as before.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Sequential, Tanh

from benchmarks.gates.tally import Tally, tallied
from benchmarks.harness import command
from benchmarks.pipelines import ENGINES, evenly, on_cpu
from reproduce.error import Error
from reproduce.models.built import unet
from reproduce.records.places import decode, read_json
from reproduce.records.record import write_atomically
from torchgpipe.tensors.checkpoint import MODES, Mode, checkpointed

FILE = Path(__file__).with_name("counts.json")

ADVICE = (
    "If this is meant, run python -m benchmarks.gates.counts --update, "
    f"and commit benchmarks/gates/{FILE.name}."
)


class Model(NamedTuple):
    """A model whose operations are counted.

    It is given by a function that builds its layers, a sample's shape, and options of `GPipe`.
    """

    build: Callable[[], Sequential]
    shape: tuple[int, ...]
    options: Mapping[str, Any] = {}


def _linear(activation: Callable[[], Module]) -> Sequential:
    layers = Sequential()
    for _ in range(4):
        layers.append(Linear(8, 8))
        layers.append(activation())
    return layers


def _norm() -> Module:
    return BatchNorm1d(8)


MODELS = {
    "linear": Model(lambda: _linear(Tanh), (8,)),
    # The U-Net has skips across partitions, and dropout.
    "U-Net": Model(lambda: unet(depth=2, num_convs=1, base_channels=2), (3, 8, 8)),
    "batch norm": Model(lambda: _linear(_norm), (8,), {"deferred_batch_norm": True}),
}
SAMPLES = 2
"""The number of samples in each micro-batch."""
STEPS = 2
"""How many steps run. The first step starts the worker threads, and the last step is counted."""


# Each line: model, n partitions on CPU devices, m micro-batches, checkpoint modes, engines.
_TABLE: list[tuple[str, int, int, tuple[Mode, ...], tuple[str, ...]]] = [
    ("linear", 1, 4, ("except_last",), ("graph",)),
    ("linear", 2, 4, MODES, ENGINES),
    ("linear", 4, 1, ("never",), ENGINES),
    ("U-Net", 4, 4, ("except_last",), ENGINES),
    ("batch norm", 2, 4, ("except_last",), ENGINES),
]
# The arguments of `count`, by the name of the configuration.
CONFIGURATIONS: dict[str, tuple[str, int, int, Mode, str]] = {}
for model, n, m, modes, engines in _TABLE:
    for mode, engine in product(modes, engines):
        name = f"{model} n{n}m{m} {mode} {engine}"
        CONFIGURATIONS[name] = model, n, m, mode, engine


Totals = dict[str, int]


class Counts(NamedTuple):
    """The operations that a pipeline adds in one training step (a forward and a backward).

    `operators` (counts by name) and `nodes` (of autograd graphs) are differences: the counts of the
    pipeline minus the counts of a plain loop over the same layers and micro-batches. The loop runs
    two forwards of each checkpointed micro-batch. So operators inside layers, which differ between
    PyTorch versions, cancel out. `waits` are calls that may wait for another thread. Before the
    step, each `.grad` is None.
    """

    operators: Counter[str]
    nodes: int
    waits: int

    def totals(self) -> Totals:
        """Return one number for each kind of count."""
        return {"operators": self.operators.total(), "nodes": self.nodes, "waits": self.waits}


def count(model: str, n: int, m: int, checkpoint: Mode, engine: str) -> Counts:
    """Count the last of `STEPS` steps of a pipeline, and subtract the counts of the plain loop."""
    build, shape, options = MODELS[model]
    x = torch.randn(m * SAMPLES, *shape)
    layers = build()
    recomputed = checkpointed(checkpoint, m)

    def plain(x: Tensor) -> Tensor:
        micro_batches = x.chunk(m) if m > 1 else [x]
        outputs = []
        for i, micro_batch in enumerate(micro_batches):
            if i < recomputed:
                with torch.no_grad():
                    layers(micro_batch)
            outputs.append(layers(micro_batch))
        return torch.cat(outputs) if m > 1 else outputs[0]

    with tallied() as tally:
        expected = _step(plain, layers, x, tally)
        balance = evenly(layers, n)
        pipeline = on_cpu(layers, balance, engine, chunks=m, checkpoint=checkpoint, **options)
        counts = _step(pipeline, pipeline, x, tally)
    counts.operators.subtract(expected.operators)
    return counts._replace(nodes=counts.nodes - expected.nodes)


def _step(model: Callable[[Tensor], Tensor], layers: Module, x: Tensor, tally: Tally) -> Counts:
    for _ in range(STEPS):
        layers.zero_grad()
        tally.clear()
        loss = model(x).square().mean()
        loss.backward()
    operators = Counter(tally.operators)
    return Counts(operators, sum(tally.nodes), len(tally.waits))


def differences(file: Mapping[str, Totals], counted: Mapping[str, Counts]) -> list[str]:
    """Return a line for each count that differs from the file's count.

    A configuration that is missing on one side (in the file or in `counted`) also gets a line.
    """
    gone = [name for name in file if name not in counted]
    new = [name for name in counted if name not in file]
    lines = [f"{name}: in {FILE.name}, but no longer counted" for name in gone]
    lines += [f"{name}: counted, but not in {FILE.name}" for name in new]
    for name, counts in counted.items():
        if name in new:
            continue
        for what, now in counts.totals().items():
            before = file[name].get(what, 0)
            if now != before:
                change = "grew" if now > before else "fell"
                line = f"{name}: {what} {change} from {before} to {now}"
                if what == "operators":
                    line += f"; in all {_listed(counts.operators)}"
                lines.append(line)
    return lines


def _listed(operators: Counter[str]) -> str:
    counts = [f"{n:+} {operator}" for operator, n in sorted(operators.items()) if n]
    return ", ".join(counts)


def main(arguments: list[str] | None = None) -> None:
    """Count every configuration and print the counts; compare them with the file, or write it."""
    parser = command("gates.counts", __doc__, record=False)
    parser.add_argument("--update", action="store_true", help="write what is counted now")
    options = parser.parse_args(arguments)
    file: dict[str, Totals] = {}
    if not options.update:
        try:
            file = decode(dict[str, Totals], read_json(FILE), str(FILE))
        except Error as error:
            update = "write it by python -m benchmarks.gates.counts --update"
            raise Error(f"counts: {error}; {update}") from None
    counted: dict[str, Counts] = {}
    lines = []
    for name, configuration in CONFIGURATIONS.items():
        counted[name] = count(*configuration)
        totals = counted[name].totals()
        lines.append(f"{json.dumps(name)}: {json.dumps(totals)}")
    rows = ",\n".join(lines)
    print(rows)
    if options.update:
        write_atomically(FILE, f"{{\n{rows}\n}}\n")
    elif changes := differences(file, counted):
        raise SystemExit("\n".join(["", *changes, ADVICE]))


if __name__ == "__main__":
    main()
