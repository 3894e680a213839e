"""Predict which is fastest: data parallel training, FSDP, a pipeline, or several pipelines.

    python -m benchmarks.which         # takes minutes, and writes results/benchmarks/which.json

No model runs on a device: `torchgpipe.plan` counts the operators of the models, and predicts the
time of a training step from descriptions of hardware. docs/which.md shows the predictions.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from benchmarks.harness import by_case, command, section
from reproduce.machine.description import ROOT
from reproduce.numbers.sources import Entry
from reproduce.predict.asked import find_given
from reproduce.records.record import Fields, Record, Result, save
from reproduce.tables.layout import grid, number
from reproduce.tables.output import Number, of_entry, written
from torchgpipe.plan import Impossible, Plan, load_hardware, plan
from torchgpipe.plan.count.tied import counted_once
from torchgpipe.plan.hardware.hardware import HEADROOM
from torchgpipe.plan.predict.between import all_reduce
from torchgpipe.plan.search.alternatives import Alternative
from torchgpipe.plan.search.trial import Candidate

PATH = ROOT / "results" / "benchmarks" / "which.json"
UNITS = {
    "throughput": "samples/s of all devices",
    "step_time": "s",
    "allocated": "bytes: the peak of what is allocated to tensors, on the fullest device",
}
WAYS = ("data parallel", "FSDP", "pipeline", "both")
MODULE = "benchmarks.models"
SCHEDULE = "1F1B"
CLOSE = 0.05  # the target of the league for the median error of a speed-up
NO_ROOM = "the devices have no room for it"
OPTIMIZER = "adam"
GiB = 2**30


@dataclass(frozen=True)
class Case:
    """A model to train on all devices of a node.

    Attributes:
        model: The name of the function in `benchmarks.models` that returns the model.
        batch_size: The number of samples in a batch, over all devices.
        hardware: The name of the hardware description.
    """

    model: str
    batch_size: int
    hardware: str

    @property
    def name(self) -> str:
        return f"{self.model}, batch of {self.batch_size}, {self.hardware}"

    @property
    def devices(self) -> int:
        return load_hardware(self.hardware).devices

    @property
    def command(self) -> str:
        """The shell command that prints this case's predictions, except for several pipelines."""
        return (
            f"python -m reproduce plan {MODULE}:{self.model} --hardware {self.hardware} "
            f"\\\n    --batch-size {self.batch_size} --optimizer {OPTIMIZER} --master-weights "
            f"--schedules {SCHEDULE}"
        )


CASES = (
    Case("gpt2", 512, "rtx4090x4"),
    Case("gpt2_long", 32, "rtx4090x4"),
    Case("gpt2_long", 4, "rtx4090x4"),
    Case("gpt2_xl", 512, "rtx4090x4"),
    Case("gpt2_xl", 32, "rtx4090x4"),
    Case("gpt2_xl", 512, "l40sx8"),
    Case("gpt2_xl", 512, "h100x8"),
    Case("llama_7b", 256, "l40sx8"),
    Case("llama_7b", 256, "h100x8"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the speed of all ways to train in all cases; save a record and print its tables."""
    options = command("which", __doc__ or "", record=False).parse_args(arguments)
    results: list[Result] = []
    for case in CASES:
        results += predicted(case)
        print(f"predicted: {case.name}", file=sys.stderr)
    title = "data parallel training, FSDP, a pipeline, or several pipelines"
    record = Record("which", title, "predicted", UNITS, results)
    save(record, PATH)
    numbers: list[Number] = []
    for result in results:
        numbers += of_entry(Entry(record, result))
    print(written(options.format, numbers, table(record, "simple"), table(record, "pipe")).rstrip())


def predicted(case: Case) -> list[Result]:
    """Return a result for each way to train a case, such as FSDP or a pipeline."""
    planned = planned_for(case)
    data_parallel, sharded = planned.beside[case.devices]
    return [
        without_pipeline(case, data_parallel, planned.room),
        without_pipeline(case, sharded, planned.room),
        of_pipelines(case, 1, planned.by_devices[case.devices].best, planned),
        several_pipelines(case, planned),
    ]


def planned_for(case: Case, pipelines: int = 1, memory: float | None = None) -> Plan:
    """Return the plan of a case's training with one pipeline, or of one of several pipelines.

    Args:
        case: The case.
        pipelines: How many pipelines share the devices and the batch equally. The plan is for one
            of them.
        memory: The bytes of each device; by default those of the hardware description.

    Raises:
        Impossible: If no setup fits into the memory.
    """
    given = find_given(f"{MODULE}:{case.model}", (), ())
    module, built = given.built(1, torch.device("meta"))
    return plan(
        module,
        built.sample,
        batch_size=case.batch_size // pipelines,
        devices=case.devices // pipelines,
        memory=memory,
        hardware=case.hardware,
        optimizer=OPTIMIZER,
        schedules=SCHEDULE,
        master_weights=True,
    )


def without_pipeline(case: Case, each: Alternative, room: float) -> Result:
    """Return the result of a case's training without a pipeline: data parallel, or FSDP.

    Args:
        case: The case (a model, a batch size and hardware).
        each: The plan's prediction for data parallel training or for FSDP.
        room: How many bytes tensors may take on each device. If they take more bytes by the
            prediction, the result says that the memory is too small.
    """
    config = {
        "micro_batches": each.micro_batches,
        "size": each.size,
        "recomputed": each.recomputed,
    }
    seconds = each.seconds if each.peak <= room else None
    return result(case, each.way, config, seconds, each.peak)


def several_pipelines(case: Case, planned: Plan) -> Result:
    """Return the result of several pipelines, which share the devices and the batch.

    All possible numbers of pipelines are tried, and the result with the highest speed is returned.
    After a step, the pipelines sum up their gradients. For this sum, each device keeps memory free
    for a second copy of its gradients.
    """
    layers = planned.predictor.counts.once
    gradients = sum([layer.parameters for layer in layers])
    found = [of_pipelines(case, 2, None, planned)]
    for pipelines in range(2, case.devices // 2 + 1):
        if case.devices % pipelines == 0 and case.batch_size % pipelines == 0:
            n = case.devices // pipelines
            memory = planned.memory - gradients / n * (1 + HEADROOM)
            with suppress(Impossible):
                best = planned_for(case, pipelines, memory).by_devices[n].best
                found.append(of_pipelines(case, pipelines, best, planned))
    return max(found, key=throughput)


def of_pipelines(case: Case, pipelines: int, best: Candidate | None, planned: Plan) -> Result:
    """Return the result of a case's training with one pipeline or with several pipelines.

    Args:
        case: The case.
        pipelines: How many pipelines there are.
        best: The prediction for one of the pipelines, or `None` if no setup fits into the memory.
        planned: The plan for a single pipeline.
    """
    way = "pipeline" if pipelines == 1 else "both"
    if best is None:
        return result(case, way, {}, None, 0.0)
    setup = best.setup
    gradients = 0.0
    for start, stop in setup.cuts:
        layers = counted_once(planned.predictor.counts.low[start:stop])
        gradients = max(gradients, sum([layer.parameters for layer in layers]))
    copied = gradients if pipelines > 1 else 0.0
    seconds = best.seconds + all_reduce(planned.hardware, gradients, pipelines)
    config = {
        "pipelines": pipelines,
        "balance": list(setup.balance),
        "micro_batches": len(setup.sizes),
        "size": setup.sizes[0],
        "checkpoint": setup.checkpoint,
    }
    return result(case, way, config, seconds, best.peak + copied)


def result(case: Case, way: str, config: Fields, seconds: float | None, allocated: float) -> Result:
    """Make a result for the record from the prediction for one way to train a case.

    Args:
        case: The case (a model, a batch size and hardware).
        way: The way to train, which is one of `WAYS`.
        config: The settings of the training, such as the number of micro-batches.
        seconds: The seconds of a step, or `None` if the memory of the devices is too small.
        allocated: The bytes of the fullest device.
    """
    if seconds is None:
        return Result(case.name, way, "out of memory", device="meta", reason=NO_ROOM)
    values = {
        "throughput": case.batch_size / seconds,
        "step_time": seconds,
        "allocated": [round(allocated)],
    }
    return Result(
        case.name,
        way,
        "predicted",
        device="meta",
        config=config,
        hardware=case.hardware,
        values=values,
    )


def throughput(result: Result) -> float:
    """Return a result's samples per second, or 0 if the devices' memory is too small."""
    return float(result.values.get("throughput", 0.0))


def table(record: Record, style: str = "simple") -> str:
    """Render tables of each case's speeds and settings, and the commands that predict them."""
    speeds = []
    setups = []
    commands = []
    for k, (case, ways) in enumerate(by_case_of(record), 1):
        about = [str(k), case.model, str(case.batch_size), case.hardware]
        speeds.append([*about, *[speed(ways[way]) for way in WAYS], ", ".join(fastest(ways))])
        fitting = [way for way in WAYS if ways[way].status == "predicted"]
        setups += [[str(k), way, *setup_of(ways[way])] for way in fitting]
        commands += [f"# {k}", case.command]
    heads = ["", "model", "batch", "hardware", *WAYS, "fastest"]
    notes = [
        "The numbers are predicted samples/s of all devices together. A star means that "
        "activations are recomputed.",
        "The column *both* is for several equal pipelines that share the batch.",
        "The last column has the fastest way to train, and the ways that are at most "
        f"{CLOSE:.0%} slower, because predictions are no more exact than that.",
    ]
    details = ["", "way", "GiB", "micro-batches", "recomputed", "pipelines", "balance"]
    about_details = [
        "The column *GiB* has the memory that tensors take on the device where they take most.",
        "In the column *micro-batches*, `8 x 16` means 8 micro-batches of 16 samples each, on each "
        "device or, with pipelines, in each pipeline.",
        "The column *balance* has the number of layers of each partition.",
    ]
    shell = "\n".join(["```sh", *commands, "```"])
    return "\n\n".join(
        [
            section("how fast each way is", grid(heads, speeds, style), notes, style),
            section("how each way is set up", grid(details, setups, style), about_details, style),
            section("the commands", shell, [], style),
        ]
    )


def by_case_of(record: Record) -> list[tuple[Case, dict[str, Result]]]:
    """Return a list of pairs: a case, and a dictionary with its results.

    The keys of the dictionary are the ways to train, such as "FSDP".
    """
    found = by_case(record)
    return [(case, found[case.name]) for case in CASES]


def fastest(ways: Mapping[str, Result]) -> list[str]:
    """Return the fastest way to train, and all ways that are at most 5% slower.

    The fastest way comes first.
    """
    ranked = sorted(ways.values(), key=throughput, reverse=True)
    least = (1 - CLOSE) * throughput(ranked[0])
    return [each.row for each in ranked if throughput(each) >= least]


def speed(result: Result) -> str:
    """Return a table cell: samples per second, with a star if activations are recomputed."""
    if result.status != "predicted":
        return "no room"
    return number(throughput(result)) + ("*" if recomputed(result) else "")


def recomputed(result: Result) -> bool:
    """Return whether training recomputes the activations of all or some micro-batches."""
    return bool(result.config.get("recomputed", result.config.get("checkpoint") != "never"))


def setup_of(result: Result) -> list[str]:
    """Return table cells that say how a case is trained.

    The cells have the memory in GiB, the micro-batches, whether activations are recomputed, the
    number of pipelines, and the balance.
    """
    config = result.config
    (allocated,) = result.values["allocated"]
    return [
        f"{allocated / GiB:.1f}",
        f"{config['micro_batches']} x {config['size']}",
        "yes" if recomputed(result) else "",
        str(config.get("pipelines", "")),
        ", ".join(map(str, config.get("balance", []))),
    ]


if __name__ == "__main__":
    main()
