"""Count what a training step does, and compare with `benchmarks/gates/counts.json`.

    python -m benchmarks.gates.counts             # exit with 1 if a count differs from the file's
    python -m benchmarks.gates.counts --update    # write the file, if the change is intended

Counts have no noise. `Counts` says what is counted, `tally` how. A lower count must be written to the file, too: or it
could grow back unnoticed.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gates.tally import Tally, tallied
from benchmarks.harness import command
from benchmarks.pipelines import ENGINES, evenly, on_cpu
from reproduce.error import Error
from reproduce.models.built import unet
from reproduce.records.places import decode, read_json
from reproduce.records.record import write_atomically
from torchgpipe.tensors.checkpoint import MODES, Mode, checkpointed

FILE = Path(__file__).with_name("counts.json")

ADVICE = f"If this is meant, run python -m benchmarks.gates.counts --update, and commit benchmarks/gates/{FILE.name}."


def _four_times(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(layer() for _ in range(4) for layer in layers))


# Layers, the shape of a sample, further options of `GPipe`.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], dict[str, Any]]] = {
    "linear": (lambda: _four_times(lambda: nn.Linear(8, 8), nn.Tanh), (8,), {}),
    # It has skips across partitions, and dropout.
    "U-Net": (lambda: unet(depth=2, num_convs=1, base_channels=2), (3, 8, 8), {}),
    "batch norm": (
        lambda: _four_times(lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8)),
        (8,),
        {"deferred_batch_norm": True},
    ),
}
SAMPLES = 2  # in a micro-batch
STEPS = 2  # the first starts the workers, the last is counted

# name -> model, n partitions on CPU devices, m micro-batches, checkpoint mode, engine (of `benchmarks.pipelines`).
CONFIGURATIONS: dict[str, Any] = {
    f"{model} n{n}m{m} {checkpoint} {engine}": (model, n, m, checkpoint, engine)
    for model, n, m, modes, engines in (
        ("linear", 1, 4, ("except_last",), ("graph",)),
        ("linear", 2, 4, MODES, ENGINES),
        ("linear", 4, 1, ("never",), ENGINES),
        ("U-Net", 4, 4, ("except_last",), ENGINES),
        ("batch norm", 2, 4, ("except_last",), ENGINES),
    )
    for checkpoint in modes
    for engine in engines
}


class Counts(NamedTuple):
    """The counts of one training step, forward and backward, that starts with `.grad` of None.

    `operators` (by name) and `nodes` are the pipeline's counts minus those of a plain loop over the same layers and
    micro-batches, with two forwards of checkpointed ones. So what layers do in a version of PyTorch does not count.
    """

    operators: Counter[str]
    nodes: int
    waits: int

    def totals(self) -> dict[str, int]:
        """Return a number for each count."""
        return {**self._asdict(), "operators": self.operators.total()}


def count(model: str, n: int, m: int, checkpoint: Mode, engine: str) -> Counts:
    """Count the last of `STEPS` steps of the pipeline, minus that of the plain loop."""
    build, shape, options = MODELS[model]
    x = torch.randn(m * SAMPLES, *shape)
    layers, recomputed = build(), checkpointed(checkpoint, m)

    def plain(x: Tensor) -> Tensor:
        outputs = []
        for i, micro_batch in enumerate(x.chunk(m) if m > 1 else [x]):
            if i < recomputed:
                with torch.no_grad():
                    layers(micro_batch)
            outputs.append(layers(micro_batch))
        return torch.cat(outputs) if m > 1 else outputs[0]

    with tallied() as tally:
        expected = _step(plain, layers, x, tally)
        pipeline = on_cpu(
            layers, evenly(layers, n), engine, chunks=m, checkpoint=checkpoint, **options
        )
        counts = _step(pipeline, pipeline, x, tally)
    counts.operators.subtract(expected.operators)
    return counts._replace(nodes=counts.nodes - expected.nodes)


def _step(model: Callable[[Tensor], Tensor], layers: nn.Module, x: Tensor, tally: Tally) -> Counts:
    for _ in range(STEPS):
        layers.zero_grad()
        tally.clear()
        model(x).square().mean().backward()
    return Counts(Counter(tally.operators), sum(tally.nodes), len(tally.waits))


def differences(file: Mapping[str, Mapping[str, int]], counted: Mapping[str, Counts]) -> list[str]:
    """Return a line for each count that differs from the file, and for each configuration that only one side has."""
    lines = [
        f"{name}: in {FILE.name}, but no longer counted" for name in file if name not in counted
    ]
    lines += [f"{name}: counted, but not in {FILE.name}" for name in counted if name not in file]
    for name in [name for name in counted if name in file]:
        for what, now in counted[name].totals().items():
            if (before := file[name].get(what, 0)) != now:
                line = f"{name}: {what} {'grew' if now > before else 'fell'} from {before} to {now}"
                each = [
                    f"{n:+} {operator}"
                    for operator, n in sorted(counted[name].operators.items())
                    if n
                ]
                lines.append(line + (f"; in all {', '.join(each)}" if what == "operators" else ""))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Count every configuration and print it; compare with the file, or write it."""
    parser = command("gates.counts", __doc__, json=False)
    parser.add_argument("--update", action="store_true", help="write what is counted now")
    options = parser.parse_args(arguments)
    try:
        file = (
            {} if options.update else decode(dict[str, dict[str, int]], read_json(FILE), str(FILE))
        )
    except Error as error:
        raise Error(
            f"counts: {error}; write it by python -m benchmarks.gates.counts --update"
        ) from None
    counted = {name: count(*configuration) for name, configuration in CONFIGURATIONS.items()}
    rows = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(counts.totals())}" for name, counts in counted.items()
    )
    print(rows)
    if options.update:
        write_atomically(FILE, f"{{\n{rows}\n}}\n")
    elif lines := differences(file, counted):
        raise SystemExit("\n".join(["", *lines, ADVICE]))


if __name__ == "__main__":
    main()
