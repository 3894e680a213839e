"""Predict the league's tables: `python -m research.league` writes results/league/NAME-predicted.json for each."""

from __future__ import annotations

from reproduce.records.places import RESULTS
from reproduce.records.record import Record, Result, load, save
from research.league.models import Sizes, counted
from torchgpipe.plan.hardware import load_hardware
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor, Setup

FOLDER = RESULTS / "league"
UNITS = {
    "throughput": "samples/s of all devices; data parallel ones cost nothing beside",
    "step_time": "s",
    "allocated": "bytes, of each device of one pipeline: the peak of what is allocated to tensors",
}


def main() -> None:
    """Predict every published table."""
    for path in sorted(FOLDER.glob("*.json")):
        if not path.stem.endswith("-predicted"):
            save(predicted(load(path)), path.with_name(f"{path.stem}-predicted.json"))
            print(f"predicted: {path.stem}")


def predicted(table: Record) -> Record:
    """Return predictions of a table's rows."""
    return Record(
        name=f"{table.name}-predicted",
        title=f"{table.title}: predicted",
        kind="predicted",
        unit=UNITS,
        results=[_row(table.name, result) for result in table.results],
    )


def _row(table: str, row: Result) -> Result:
    config = row.config
    counts = counted(Sizes(**config["model"]), config["dtype"])
    node = load_hardware(config["hardware"])
    setup = Setup(
        batch_size=config["batch_size"] // config["replicas"],
        balance=_balance(config["model"]["layers"], config["partitions"]),
        chunks=config["chunks"],
        checkpoint=config["checkpoint"],
        optimizer=optimizer_named(
            config["optimizer"], foreach=True, master_weights="16" in config["dtype"] and config["optimizer"] != "none"
        ),
    )
    step = Predictor(counts, node).step(setup)
    return Result(
        table,
        row.row,
        "predicted",
        device="meta",
        config=config,
        over=row.over,
        published=f"{table}/{row.row}",
        hardware=node.name,
        values={
            "throughput": float(f"{config['batch_size'] / step.seconds:.6g}"),
            "step_time": float(f"{step.seconds:.6g}"),
            "allocated": [round(device.peak) for device in setup_memory(counts, setup)],
        },
    )


def _balance(layers: int, partitions: int) -> tuple[int, ...]:
    """Return equal shares of the blocks, with the embedding in the first partition and the head in the last."""
    balance = [layers // partitions] * partitions
    balance[0] += 1
    balance[-1] += 1
    return tuple(balance)


if __name__ == "__main__":
    main()
