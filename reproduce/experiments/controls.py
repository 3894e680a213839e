"""Generate rows: the published ones of n partitions, and controls, which nobody has published.

The published rows vary the batch with n and m, so they mix pipelining with larger batches. The controls are naive
model parallelism, checkpoint-only and GPipe, and keep one thing equal:

- the batch size: every row does the same work on the same samples, in more or in fewer parts;
- the micro-batch size: kernels work on equally large tensors in every row; the batch size grows with m.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from reproduce.experiments import row as constants
from reproduce.experiments.row import (
    PUBLISHED_BALANCE,
    SMALL_SCALE,
    Checkpoint,
    Experiment,
    GiB,
    Row,
    Scale,
)

PARTITIONS = (2, 4, 8)
CHUNKS, SMALL_CHUNKS = (4, 32), (4, 8)  # of the controls
SMALL_MICRO_BATCH = 4  # of the small scale's controls at equal micro-batch size

Balance = tuple[int, ...]

# name, m, batch size, balance; the first row is plain training
Published = Sequence[tuple[str, int | None, int, Balance | None]]
# name, published model size, small scale's, m (None: micro-batches of one sample), balance; first row: plain training
Sizes = Sequence[tuple[str, tuple[int, ...], tuple[int, ...], int | None, Balance | None]]


def speed_experiment(
    name: str,
    title: str,
    table: str,
    base: Row,
    theirs: Sequence[Row],
    micro_batch: int,
    small: Row,
    batch_sizes: Sequence[int],
    seconds: float,
) -> Experiment:
    """Return a speed experiment. Scale paper: the published rows and controls of `base`; scale small: of `small`.

    At scale paper, controls have the published balances, and `micro_batch` samples at equal micro-batch size. At scale
    small, the published rows get `batch_sizes`. Groups share `seconds`; groups of extra rows have more time on top.
    """
    balances = {len(row.balance): row.balance for row in theirs if row.balance}
    balances[1] = (sum(balances[PARTITIONS[0]]),)
    like = smaller(theirs, small, batch_sizes)
    scales = (
        replace(
            constants.PAPER_SCALE, rows=(*theirs, *controls(base, micro_batch, CHUNKS, balances))
        ),
        replace(
            SMALL_SCALE,
            rows=(*like, *controls(small, SMALL_MICRO_BATCH, SMALL_CHUNKS, None)),
            seconds=seconds,
        ),
    )
    return Experiment(name=name, title=title, measures="speed", table=table, scales=scales)


def memory_experiment(
    name: str, title: str, table: str, base: Row, small: Row, sizes: Sizes
) -> Experiment:
    """Return a memory experiment. Scale paper has models of the published sizes, scale small smaller ones."""
    scales = (
        Scale(
            name="paper",
            rows=memory_rows(base, sizes),
            memory=constants.P40_MEMORY,
            cuda=True,
            steps=2,
        ),
        Scale(
            name="small",
            rows=memory_rows(small, sizes, small=True),
            memory=4 * GiB,
            cuda=False,
            steps=2,
        ),
    )
    return Experiment(name=name, title=title, measures="memory", table=table, scales=scales)


def published_rows(base: Row, table: Published, samples: int) -> tuple[Row, ...]:
    """List plain training and pipelines of n partitions, each row with its own batch size.

    An epoch has so many `samples`. The published timing leaves out the first epoch.
    """
    base = replace(base, configuration=constants.AS_PUBLISHED, over=table[0][0], skip_epochs=1)
    return tuple(
        _pipelined(
            replace(
                base,
                name=name,
                published=name,
                batch_size=size,
                steps_per_epoch=math.ceil(samples / size),
            ),
            chunks,
            balance,
        )
        for name, chunks, size, balance in table
    )


def smaller(rows: Sequence[Row], base: Row, batch_sizes: Sequence[int]) -> tuple[Row, ...]:
    """List rows like the published `rows`, with the smaller model of `base` and smaller batch sizes.

    Their balance is profiled here, as the published one was profiled on the published hardware. Rows of several
    partitions are listed once more with the published balance.
    """
    like = [
        replace(
            row,
            configuration=constants.LIKE_PUBLISHED,
            model=base.model,
            size=base.size,
            batch_size=batch_size,
            input_shape=base.input_shape,
            balance=None,
            steps_per_epoch=0,
            skip_epochs=0,
            link=constants.PUBLISHED_NODE,
        )
        for row, batch_size in zip(rows, batch_sizes, strict=True)
    ]
    return (
        *like,
        *(
            replace(
                row,
                name=f"{row.name}/pb",
                configuration=PUBLISHED_BALANCE,
                balance=theirs.balance,
                published=None,
            )
            for row, theirs in zip(like, rows, strict=True)
            if row.devices > 1
        ),
    )


def memory_rows(base: Row, table: Sizes, *, small: bool = False) -> tuple[Row, ...]:
    """List plain training, and pipelines of n partitions: the more partitions, the larger the model."""
    rows = []
    for name, size, small_size, chunks, balance in table:
        configuration = "baseline" if balance is None else "pipeline"
        row = replace(
            base,
            name=name,
            published=name,
            configuration=configuration,
            size=small_size if small else size,
        )
        row = _pipelined(row, chunks or base.batch_size, balance)
        rows.append(replace(row, balance=None) if small else row)
    return tuple(rows)


def _pipelined(row: Row, chunks: int | None, balance: Balance | None) -> Row:
    """Return the row in the partitions of `balance`, or unchanged. A lone micro-batch is recomputed, as published."""
    if balance is None:
        return row
    checkpoint: Checkpoint = "always" if chunks == 1 else "except_last"
    return replace(
        row, partitions=len(balance), chunks=chunks, checkpoint=checkpoint, balance=balance
    )


def controls(
    base: Row, micro_batch: int, ms: Sequence[int], balances: Mapping[int, Balance] | None
) -> tuple[Row, ...]:
    """List the controls at `base`'s batch size, then those with `micro_batch` samples per micro-batch, named .../mb.

    Without `balances`, balances are profiled.
    """
    made: list[tuple[str, int, int, Checkpoint, str, int]] = [
        *(("naive", n, 1, "never", f"naive n{n}", n) for n in PARTITIONS),
        *(("checkpoint-only", 1, m, "always", f"checkpoint-only m{m}", PARTITIONS[0]) for m in ms),
        *(("GPipe", n, m, "except_last", f"GPipe n{n}m{m}", n) for n in PARTITIONS for m in ms),
    ]
    equal = [
        replace(
            base,
            configuration=configuration,
            partitions=n,
            chunks=m,
            checkpoint=checkpoint,
            name=name,
            over=f"naive n{naive}",
            equal="batch",
            balance=None if balances is None else balances[n],
        )
        for configuration, n, m, checkpoint, name, naive in made
    ]
    micro = [
        replace(
            row,
            name=f"{row.name}/mb",
            over=f"{row.over}/mb",
            equal="micro-batch",
            batch_size=micro_batch * (row.chunks or 1),
        )
        for row in equal
    ]
    return (*equal, *micro)
