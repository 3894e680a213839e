"""Predict the results of rows (configurations) of published tables, or of a run.

A row of a published table is predicted from its published configuration and a hardware
description, and nothing is measured. The predictions of a table are stored in a record (a file of
results), with the status `predicted`. This record has no date and does not name the machine that
made it. So the same source code always writes the same file.
"""

from dataclasses import replace

import torch
from msgspec import structs

from reproduce.error import Error
from reproduce.experiments import predictable
from reproduce.models.built import MODELS, SizedModel
from reproduce.models.counted import counted, setup_of
from reproduce.records.places import Json
from reproduce.records.published import published
from reproduce.records.record import Record, Result
from reproduce.records.text import rounded
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.predict.memory import setup_memory
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.profiled import predictor_here
from torchgpipe.trace.sequential import flat

# The tables for which the errors of the predictions are reported.
SPEED_TABLES = ("amoebanet-speed", "unet-speed", "resnet101-speed")

UNITS = {
    "throughput": "samples/s, over an epoch where the published one is",
    "step_time": "s",
    "bubble": "share of the devices' time",
    "allocated": "bytes, of each device: the peak of what is allocated to tensors",
    "model": "bytes, of all devices: parameters, buffers, gradients and optimizer state",
}
DIGITS = 6  # significant digits to keep; more would be rounding noise

RESERVED = ("memory", "peak_activation_memory")
"""Names of published memory values.

They are GiB that the caching allocator has reserved, summed over devices.
"""

UNORDERED = "without the dependency nothing orders backward, so there is no one schedule to replay"


def predict_table(experiment: str, hardware: Hardware) -> Record:
    """Predict every row (configuration) of an experiment's published table on `hardware`."""
    table = published(predictable()[experiment])
    results = [predict_row(experiment, table.name, row, hardware) for row in table.results]
    return _record(experiment, table.title, "paper", hardware, results)


def predict_run(record: Record, hardware: Hardware | torch.device) -> Record:
    """Predict the emulated rows of a run, on described hardware or on this machine.

    If `hardware` is a device of this machine, the layers of each model are timed on this device,
    with the largest micro-batch that the run uses for the model. As in an emulation, only one
    device works at a time.

    Rows that have no one schedule (those of the ablation without dependencies) are left out.
    """
    emulated = [row for row in record.results if row.status == "emulated"]
    rows = [row for row in emulated if not _is_unordered(row.config)]
    if not rows:
        raise Error(f"{record.name}: no row can be predicted: {UNORDERED}")
    largest: dict[SizedModel, int] = {}  # the most samples in a micro-batch of each model
    for row in rows:
        model = _model(row.config)
        samples = row.config["micro_batch_size"] or row.config["batch_size"]
        largest[model] = max(largest.get(model, 0), samples)
    predictors = {model: _predictor(model, most, hardware) for model, most in largest.items()}

    results = []
    for row in rows:
        predictor = predictors[_model(row.config)]
        values = _speed(predictor, row.config, zeroed=False)
        result = Result(
            experiment=row.experiment,
            row=row.row,
            status="predicted",
            scale=row.scale,
            device="meta",
            config=row.config,
            over=row.over,
            values=rounded(values, DIGITS),
        )
        results.append(result)
    first = next(iter(predictors.values()))
    return _record(record.name, record.title, record.scale, first.hardware, results)


def _record(
    name: str, title: str, scale: str | None, hardware: Hardware, results: list[Result]
) -> Record:
    return Record(
        name=f"{name}-{hardware.name}",
        title=f"{title}: predicted, on {hardware.name}",
        kind="predicted",
        unit=UNITS,
        results=results,
        scale=scale,
        hardware=_described(hardware),
    )


def _model(config: dict[str, Json]) -> SizedModel:
    """Return the model that a row trains, given the row's settings from a record of results."""
    name = config["model"]
    sizes = [config[size] for size in MODELS[name].sizes if size in config]
    input_shape = tuple(config["input_shape"])
    return SizedModel(name, tuple(sizes), input_shape, config.get("num_classes"))


def _predictor(model: SizedModel, samples: int, on: Hardware | torch.device) -> Predictor:
    if isinstance(on, Hardware):
        return Predictor(counted(model), on)
    with torch.device("meta"):
        module = model.layers()
    x, _ = model.batch(samples, device=on)
    x = flat(module, x)
    counts = count(module, x, device=on.type)
    return predictor_here(module, x, counts, devices=1)


def _described(hardware: Hardware) -> dict[str, Json]:
    """Return a hardware description as a dictionary, to store it in a record (file of results)."""
    figures: dict[str, Json] = {
        "name": hardware.name,
        "title": hardware.title,
        "devices": hardware.devices,
    }
    for key in hardware.sources:
        table, _, item = key.partition(".")
        value = getattr(hardware, table)
        if item:
            value = value[item]
        figures[key] = value
    return figures


def predict_row(experiment: str, table: str, row: Result, hardware: Hardware) -> Result:
    """Predict one row (a configuration) of the published table called `table`, on `hardware`."""
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
    if _is_unordered(config):
        return structs.replace(result, status="not run", reason=UNORDERED)
    counts = counted(_model(config))
    values: dict[str, Json] = {}
    if "throughput" in row.values:
        predictor = Predictor(counts, hardware)
        values.update(_speed(predictor, config))
    if any(name in row.values for name in RESERVED):
        values.update(_memory(counts, config))
    return structs.replace(result, values=rounded(values, DIGITS))


def _is_unordered(config: dict[str, Json]) -> bool:
    """Return whether a row is one of the ablation in which nothing orders the backwards."""
    components = config.get("components")
    return components is not None and "dependency" not in components


def _speed(
    predictor: Predictor, config: dict[str, Json], *, zeroed: bool = True
) -> dict[str, float]:
    """Predict the throughput, the time of a step, and the bubble of a row (a configuration).

    The papers measured the throughput over an epoch whose last mini-batch is smaller than the
    others. If the row's configuration has the size of that mini-batch, the predicted throughput is
    also over such an epoch.
    """
    setup = setup_of(config, len(predictor.counts), zeroed=zeroed)
    step = predictor.step(setup)
    samples = float(setup.batch_size)
    seconds = step.seconds
    if "last_batch_size" in config:
        full_steps = config["steps_per_epoch"] - 1
        last_batch_size = config["last_batch_size"]
        last = predictor.step(replace(setup, batch_size=last_batch_size))
        samples = setup.batch_size * full_steps + last_batch_size
        seconds = step.seconds * full_steps + last.seconds
    return {"throughput": samples / seconds, "step_time": step.seconds, "bubble": step.bubble}


def _memory(counts: Counts, config: dict[str, Json]) -> dict[str, Json]:
    """Predict every device's peak memory with today's PyTorch.

    The result is empty for a pipeline without portals, because its memory cannot be predicted. A
    pipeline without portals copies each skip through all partitions between its ends.
    """
    setup = setup_of(config, len(counts))
    if not setup.portals:
        return {}
    peaks = [round(device.peak) for device in setup_memory(counts, setup)]
    each = 2 + setup.optimizer.state  # a parameter, its gradient and the optimizer's values
    model = sum(layer.parameters * each + layer.frozen for layer in counts.low)
    return {"allocated": peaks, "model": round(model)}
