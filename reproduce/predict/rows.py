"""Predict the rows of a published table, in the published configuration, from a hardware description alone.

The result is a record whose results have status `predicted`. It names the hardware description. It holds neither date
nor machine, so the same source code always writes the same file.
"""

from dataclasses import replace

import torch
from msgspec import structs

from reproduce.experiments import predictable
from reproduce.models.built import MODELS, SizedModel
from reproduce.models.counted import counted, setup_of
from reproduce.records.places import Json
from reproduce.records.published import published
from reproduce.records.record import Record, Result, rounded
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.profiled import predictor_here
from torchgpipe.trace.layer import flat

SPEED_TABLES = ("amoebanet-speed", "unet-speed", "resnet101-speed")  # of which errors are told

UNITS = {
    "throughput": "samples/s, over an epoch where the published one is",
    "step_time": "s",
    "bubble": "share of the devices' time",
    "allocated": "bytes, of each device: the peak of what is allocated to tensors",
    "model": "bytes, of all devices: parameters, buffers, gradients and optimizer state",
}
DIGITS = 6  # significant digits to keep; more would be rounding noise

RESERVED = ("memory", "peak_activation_memory")
"""Names of published memory values. They are GiB reserved by the caching allocator, summed over devices."""

UNORDERED = "without the dependency nothing orders backward, so there is no one schedule to replay"


def predict_table(experiment: str, hardware: Hardware) -> Record:
    """Predict every row of the experiment's published table on `hardware`."""
    table = published(predictable()[experiment])
    results = [predict_row(experiment, table.name, row, hardware) for row in table.results]
    return _record(experiment, table.title, "paper", hardware, results)


def predict_run(record: Record, hardware: Hardware | torch.device) -> Record:
    """Predict the emulated rows of a run from a hardware description, or from layers timed on a device of this machine.

    Layers are timed with the run's largest micro-batch, on one device while the others are idle, as in emulation.
    """
    rows = [row for row in record.results if row.status == "emulated"]
    largest: dict[SizedModel, int] = {}
    for row in rows:
        key = _model(row.config)
        largest[key] = max(
            largest.get(key, 0), row.config["micro_batch_size"] or row.config["batch_size"]
        )
    predictors = {key: _predictor(key, size, hardware) for key, size in largest.items()}
    results = [
        Result(
            row.experiment,
            row.row,
            "predicted",
            row.scale,
            "meta",
            row.config,
            row.over,
            values=rounded(
                _speed(predictors[_model(row.config)], row.config, zeroed=False), DIGITS
            ),
        )
        for row in rows
    ]
    hardware = next(iter(predictors.values())).hardware
    return _record(record.name, record.title, record.scale, hardware, results)


def _record(
    name: str, title: str, scale: str | None, hardware: Hardware, results: list[Result]
) -> Record:
    name, title = f"{name}-{hardware.name}", f"{title}: predicted, on {hardware.name}"
    return Record(name, title, "predicted", UNITS, results, scale, hardware=_described(hardware))


def _model(config: dict[str, Json]) -> SizedModel:
    sizes = tuple(config[name] for name in MODELS[config["model"]].sizes if name in config)
    return SizedModel(
        config["model"], sizes, tuple(config["input_shape"]), config.get("num_classes")
    )


def _predictor(model: SizedModel, samples: int, on: Hardware | torch.device) -> Predictor:
    if isinstance(on, Hardware):
        return Predictor(counted(model), on)
    with torch.device("meta"):
        module = model.layers()
    sample = flat(module, model.batch(samples, device=on)[0])
    return predictor_here(module, sample, count(module, sample, device=on.type), devices=1)


def _described(hardware: Hardware) -> dict[str, Json]:
    """Return the numbers of the hardware description for the record."""
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
        experiment, row.row, "predicted", "paper", "meta", config, published=f"{table}/{row.row}"
    )
    components = config.get("components")
    if components is not None and "dependency" not in components:
        return structs.replace(result, status="not run", reason=UNORDERED)
    with_memory = any(name in row.values for name in RESERVED)
    counts = counted(_model(config))
    values: dict[str, Json] = {}
    if "throughput" in row.values:
        values.update(_speed(Predictor(counts, hardware), config))
    if with_memory:
        values.update(_memory(counts, config))
    return structs.replace(result, values=rounded(values, DIGITS))


def _speed(
    predictor: Predictor, config: dict[str, Json], *, zeroed: bool = True
) -> dict[str, float]:
    """Predict a step, and the throughput over an epoch as the papers measured it: with its smaller last mini-batch."""
    setup = setup_of(config, len(predictor.counts), zeroed=zeroed)
    step = predictor.step(setup)
    samples, seconds = float(setup.batch_size), step.seconds
    if "last_batch_size" in config:
        steps, last = config["steps_per_epoch"], config["last_batch_size"]
        samples = setup.batch_size * (steps - 1) + last
        seconds = (
            step.seconds * (steps - 1) + predictor.step(replace(setup, batch_size=last)).seconds
        )
    return {"throughput": samples / seconds, "step_time": step.seconds, "bubble": step.bubble}


def _memory(counts: Counts, config: dict[str, Json]) -> dict[str, Json]:
    """Predict every device's peak memory with today's PyTorch. Without portals it cannot be predicted."""
    setup = setup_of(config, len(counts))
    if not setup.portals:
        return {}
    devices = setup_memory(counts, setup)
    kept = round(
        sum(layer.parameters * (2 + setup.optimizer.state) + layer.frozen for layer in counts.low)
    )
    return {"allocated": [round(device.peak) for device in devices], "model": kept}
