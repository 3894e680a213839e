"""Predict the rows of a published table, as they were configured there, on a described node and without running them.

Results are records like any other, with status `predicted`; which description of hardware was used stands in them.
They hold no time and no machine, so that the same source gives the same file.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from msgspec import structs

from reproduce.experiments import EXPERIMENTS
from reproduce.models import MODELS
from reproduce.records.decode import Json
from reproduce.records.published import published
from reproduce.records.record import Record, Result
from torchgpipe.plan.alike import Alike
from torchgpipe.plan.count import Counts, count
from torchgpipe.plan.hardware import Hardware
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.profiled import predictor_here

SPEED_TABLES = ("amoebanet-speed", "unet-speed", "resnet101-speed")
"""Those whose speed-ups the targets are about."""

UNITS = {
    "throughput": "samples/s, over an epoch where the published one is",
    "step_time": "s",
    "bubble": "share of the devices' time",
    "allocated": "bytes, of each device: the peak of what is allocated to tensors",
    "model": "bytes, of all devices: parameters, buffers, gradients and optimizer state",
}
DIGITS = 6  # that are kept: more would be noise of the arithmetic

RESERVED = ("memory", "peak_activation_memory")
"""Published values of memory: GiB, as reserved by the caching allocator, summed over devices."""

Model = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A row's model, its sizes, and a sample's shape."""

UNORDERED = "without the dependency nothing orders backward, so there is no one schedule to replay"


def predictable() -> dict[str, str]:
    """Return the experiments that can be predicted, each with its published table."""
    return {each.name: each.table for each in EXPERIMENTS.values() if each.table and each.measures != "accuracy"}


def predict_table(experiment: str, hardware: Hardware) -> Record:
    """Predict every row of the experiment's published table on `hardware`."""
    table = published(predictable()[experiment])
    return Record(
        name=f"{experiment}-{hardware.name}",
        title=f"{table.title}: predicted, on {hardware.name}",
        kind="predicted",
        unit=UNITS,
        scale="paper",
        hardware=_described(hardware),
        results=[predict_row(experiment, table.name, row, hardware) for row in table.results],
    )


def predict_run(record: Record, hardware: Hardware | torch.device) -> Record:
    """Predict the emulated rows of a run, as they were run, on `hardware`; or on a device here, where models are timed.

    They are timed in micro-batches as large as the run's largest. A device has no others beside it, as in emulation.
    """
    rows = [row for row in record.results if row.status == "emulated"]
    largest: dict[Model, int] = {}
    for row in rows:
        key = _model(row.config)
        largest[key] = max(largest.get(key, 0), row.config["micro_batch_size"] or row.config["batch_size"])
    predictors = {
        key: Predictor(counted(*key, memory=False), hardware)
        if isinstance(hardware, Hardware)
        else _profiled(*key, size, hardware)
        for key, size in largest.items()
    }
    results = []
    for row in rows:
        values = _speed(predictors[_model(row.config)], row.config, zeroed=False)
        rounded = {name: _rounded(value) for name, value in values.items()}
        results.append(
            Result(row.experiment, row.row, "predicted", row.scale, "meta", row.config, row.over, values=rounded)
        )
    hardware = next(iter(predictors.values())).hardware
    return Record(
        name=f"{record.name}-{hardware.name}",
        title=f"{record.title}: predicted, on {hardware.name}",
        kind="predicted",
        unit=UNITS,
        scale=record.scale,
        hardware=_described(hardware),
        results=results,
    )


def _model(config: dict[str, Json]) -> Model:
    sizes = tuple(config[name] for name in MODELS[config["model"]].sizes if name in config)
    return config["model"], sizes, tuple(config["input_shape"])


def _profiled(
    model: str, sizes: tuple[int, ...], input_shape: tuple[int, ...], rows: int, on: torch.device
) -> Predictor:
    with torch.device("meta"):
        module = MODELS[model].build(*sizes)
    sample = torch.rand(rows, *input_shape, device=on)
    return predictor_here(module, sample, count(module, sample, device=on.type), devices=1)


def _described(hardware: Hardware) -> dict[str, Json]:
    """Return the description's figures, as a record keeps them."""
    figures: dict[str, Json] = {key: getattr(hardware, key) for key in ("name", "title", "devices")}
    for key in hardware.sources:
        table, _, item = key.partition(".")
        value = getattr(hardware, table)
        figures[key] = value[item] if item else value
    return figures


def predict_row(experiment: str, table: str, row: Result, hardware: Hardware) -> Result:
    """Predict one published row of `table`."""
    config = row.config
    result = Result(
        experiment=experiment,
        row=row.row,
        status="predicted",
        scale="paper",
        device="meta",
        config=config,
        published=f"{table}/{row.row}",
    )
    components = config.get("components")
    if components is not None and "dependency" not in components:
        return structs.replace(result, status="not run", reason=UNORDERED)
    with_memory = any(name in row.values for name in RESERVED)
    counts = counted(*_model(config), memory=with_memory)
    values: dict[str, Json] = {}
    if "throughput" in row.values:
        values.update(_speed(Predictor(counts, hardware), config))
    if with_memory:
        values.update(_memory(counts, config))
    return structs.replace(result, values={name: _rounded(value) for name, value in values.items()})


def _setup(config: dict[str, Json], layers: int, *, zeroed: bool = True) -> Setup:
    """Return a row's setup; a row without a pipeline is one partition and one micro-batch.

    `zeroed`: gradients were kept and set to zero, as PyTorch of the papers' time did.
    """
    components = config.get("components")
    name = config["optimizer"].lower()
    return Setup(
        batch_size=config["batch_size"],
        balance=tuple(config["balance"] or (layers,)),
        chunks=config["chunks"] or 1,
        checkpoint=config["checkpoint"] or "never",
        # PyTorch of that time updated one parameter after another, on GPUs too, and set gradients to zero.
        optimizer=optimizer_named("momentum" if name == "sgd" and config.get("momentum") else name, foreach=False),
        portals=components is None or "portals" in components,
        streams=components is None or "streams" in components,
        zeroed=zeroed,
    )


def _speed(predictor: Predictor, config: dict[str, Json], *, zeroed: bool = True) -> dict[str, float]:
    """Predict one step, and the throughput of an epoch as the papers took it: with its last, smaller mini-batch."""
    setup = _setup(config, len(predictor.counts), zeroed=zeroed)
    step = predictor.step(setup)
    samples, seconds = float(setup.batch_size), step.seconds
    if "last_batch_size" in config:
        steps, last = config["steps_per_epoch"], config["last_batch_size"]
        samples = setup.batch_size * (steps - 1) + last
        seconds = step.seconds * (steps - 1) + predictor.step(replace(setup, batch_size=last)).seconds
    return {"throughput": samples / seconds, "step_time": step.seconds, "bubble": step.bubble}


def _memory(counts: Counts, config: dict[str, Json]) -> dict[str, Json]:
    """Predict every device's peak, with PyTorch of today; without portals, nothing."""
    setup = _setup(config, len(counts), zeroed=False)
    if not setup.portals:
        return {}
    devices = setup_memory(counts, setup)
    kept = round(sum(layer.parameters * (2 + setup.optimizer.state) + layer.frozen for layer in counts.low))
    return {"allocated": [round(device.peak) for device in devices], "model": kept}


ALIKE = Alike()
"""Models of one family have many layers in common."""


def counted(model: str, sizes: tuple[int, ...], input_shape: tuple[int, ...], *, memory: bool = True) -> Counts:
    """Count the layers of a model of these sizes, for samples of that shape; their memory only if asked for.

    PyTorch's present settings count: autocast for GPUs, and the precision of float32.
    """
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return _counted(model, sizes, input_shape, memory, autocast, *(kind.fp32_precision for kind in kinds))


@functools.cache
def _counted(model: str, sizes: tuple[int, ...], input_shape: tuple[int, ...], memory: bool, *_: object) -> Counts:
    with torch.device("meta"):
        module, sample = MODELS[model].build(*sizes), torch.empty(1, *input_shape)
    return count(module, sample, memory=memory, alike=ALIKE)


def _rounded(value: Json) -> Json:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
