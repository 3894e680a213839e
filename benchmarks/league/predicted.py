"""Predict the rows of a published table from their configurations and a hardware description."""

import functools

import torch

from benchmarks.league.transformer import Sizes, transformer
from reproduce.predict.rows import DIGITS
from reproduce.records.record import Record, Result
from reproduce.records.text import rounded
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.count.known import Alike
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.hardware.hardware import load_hardware
from torchgpipe.plan.predict.memory import setup_memory
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup

UNITS = {
    "throughput": "samples/s of all devices; data parallel ones cost nothing beside",
    "step_time": "s",
    "allocated": "bytes, of each device of one pipeline: the peak of what is allocated to tensors",
}
ALIKE = Alike()  # a cache of counted layers: all blocks of a transformer are equal


def predicted(table: Record) -> Record:
    """Return a record with predictions of all rows of a published table."""
    return Record(
        name=f"{table.name}-predicted",
        title=f"{table.title}: predicted",
        kind="predicted",
        unit=UNITS,
        results=[predicted_row(table.name, row) for row in table.results],
    )


def predicted_row(table: str, row: Result) -> Result:
    """Predict the speed and memory of one row of the published table that is named `table`."""
    config = row.config
    counts = counted(Sizes(**config["model"]), config["dtype"])
    hardware = load_hardware(config["hardware"])
    in_16_bits = "16" in config["dtype"]
    optimizer = optimizer_named(
        config["optimizer"],
        foreach=True,
        master_weights=in_16_bits and config["optimizer"] != "none",
    )
    setup = Setup(
        batch_size=config["batch_size"] // config["replicas"],
        balance=equal_balance(config["model"]["layers"], config["partitions"]),
        chunks=config["chunks"],
        checkpoint=config["checkpoint"],
        optimizer=optimizer,
    )
    seconds = Predictor(counts, hardware).step(setup).seconds
    speed = {"throughput": config["batch_size"] / seconds, "step_time": seconds}
    peaks = [round(device.peak) for device in setup_memory(counts, setup)]
    return Result(
        table,
        row.row,
        "predicted",
        device="meta",
        config=config,
        over=row.over,
        published=f"{table}/{row.row}",
        hardware=hardware.name,
        values={**rounded(speed, DIGITS), "allocated": peaks},
    )


@functools.cache
def counted(sizes: Sizes, dtype: str) -> Counts:
    """Count the operations of each layer of a transformer, and the bytes that they read and write.

    Args:
        sizes: The sizes of the transformer.
        dtype: The type of the parameters, such as "bfloat16". "tf32" means float32 parameters, and
            matrix products in TF32.
    """
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        with torch.device("meta"):
            model = transformer(sizes)
            sample = torch.empty(1, sizes.tokens, dtype=torch.long)
        kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        return count(model.to(kind), sample, alike=ALIKE)
    finally:
        products.fp32_precision = before


def equal_balance(blocks: int, partitions: int) -> tuple[int, ...]:
    """Return a balance with equally many transformer blocks in each partition.

    The first partition has the embedding in addition, and the last partition has the head.
    """
    balance = [blocks // partitions] * partitions
    balance[0] += 1
    balance[-1] += 1
    return tuple(balance)
