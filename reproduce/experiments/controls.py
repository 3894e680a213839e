"""Generate the rows of experiments: the published rows, and additional rows called controls.

In the published rows, the batch size changes with the numbers of partitions (n) and micro-batches
(m). So the published speed-ups mix the effect of pipelining with the effect of larger batches. The
controls separate these effects. They are rows of naive model parallelism, of checkpointing alone,
and of GPipe. There are two groups of controls:

- Controls at equal batch size: all rows train on the same samples in a step, split into m
  micro-batches.
- Controls at equal micro-batch size: the batch size grows with m, so that kernels work on equally
  large tensors in all rows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from reproduce.experiments.row import (
    AS_PUBLISHED,
    LIKE_PUBLISHED,
    P40_MEMORY,
    PAPER_SCALE,
    PUBLISHED_BALANCE,
    PUBLISHED_NODE,
    SMALL_SCALE,
    Checkpoint,
    GiB,
    Row,
    Scale,
)

# The numbers of partitions (n) and of micro-batches (m) of the controls:
PARTITIONS = (2, 4, 8)
CHUNKS = (4, 32)
SMALL_CHUNKS = (4, 8)
SMALL_MICRO_BATCH = 4  # samples per micro-batch of small controls at equal micro-batch size

Balance = tuple[int, ...]
Size = tuple[int, ...]
Rows = tuple[Row, ...]

# The rows of a published table of speeds. Each row has a name, a number of micro-batches (m), a
# batch size, and a balance. m and the balance are None for plain training without a pipeline.
Published = Sequence[tuple[str, int | None, int, Balance | None]]
# The rows of a published table of memory. Each row has a name, the published model size, the model
# size at the small scale, a number of micro-batches (m), and a balance. If m is None, a micro-batch
# has one sample. The balance is None for plain training without a pipeline.
Sizes = Sequence[tuple[str, Size, Size, int | None, Balance | None]]


def paper_speed(base: Row, published: Sequence[Row], *, micro_batch: int) -> Scale:
    """Return the scale (set of sizes) `paper`: published rows, and additional rows (controls).

    Args:
        base: The settings that all controls have in common.
        published: The published rows.
        micro_batch: The samples per micro-batch of the controls at equal micro-batch size.
    """
    balances = {}
    for row in published:
        if row.balance:
            balances[len(row.balance)] = row.balance
    layers = sum(balances[PARTITIONS[0]])
    balances[1] = (layers,)
    rows = controls(base, micro_batch, CHUNKS, balances)
    return replace(PAPER_SCALE, rows=(*published, *rows))


def small_speed(
    base: Row, published: Sequence[Row], *, batch_sizes: Sequence[int], seconds: float
) -> Scale:
    """Return the scale `small`: smaller variants of published rows, and further rows (controls).

    Args:
        base: The settings that all controls have in common. All rows use the model of `base`.
        published: The published rows.
        batch_sizes: The batch sizes of the variants, in the order of `published`.
        seconds: The time limit for all rows that run by default. Rows that run only with --all or
            --row have additional time.
    """
    like = smaller(published, base, batch_sizes)
    rows = controls(base, SMALL_MICRO_BATCH, SMALL_CHUNKS, None)
    return replace(SMALL_SCALE, rows=(*like, *rows), seconds=seconds)


def memory_scales(base: Row, small: Row, sizes: Sizes) -> tuple[Scale, Scale]:
    """Return the two scales of a memory experiment, `paper` and `small`.

    Args:
        base: The settings that all rows of `paper` have in common.
        small: The settings that all rows of `small` have in common.
        sizes: The rows, with the sizes of their models at both scales.
    """
    paper = Scale(
        name="paper",
        rows=memory_rows(base, sizes),
        memory=P40_MEMORY,
        cuda=True,
        steps=2,
    )
    small_scale = Scale(
        name="small",
        rows=memory_rows(small, sizes, small=True),
        memory=4 * GiB,
        cuda=False,
        steps=2,
    )
    return paper, small_scale


def published_rows(base: Row, table: Published, samples: int) -> Rows:
    """Return the rows that reproduce a published table of speeds.

    The table's first row is the baseline of all speed-ups.

    Args:
        base: The settings that all rows have in common.
        table: The rows of the published table.
        samples: The number of samples in an epoch. The first epoch is not timed, as in the paper.
    """
    plain = table[0][0]
    base = replace(base, configuration=AS_PUBLISHED, over=plain, skip_epochs=1)
    rows = []
    for name, chunks, batch_size, balance in table:
        steps = math.ceil(samples / batch_size)
        row = replace(base, name=name, published=name, batch_size=batch_size, steps_per_epoch=steps)
        rows.append(_pipelined(row, chunks, balance))
    return tuple(rows)


def smaller(rows: Sequence[Row], base: Row, batch_sizes: Sequence[int]) -> Rows:
    """Return variants of the published rows with the smaller model of `base` and smaller batches.

    The balance of a variant is found by profiling on this machine, because the published balance
    was found by profiling on other hardware. A row with several partitions also has a second
    variant, with the published balance.
    """
    profiled = []
    as_published = []
    for row, batch_size in zip(rows, batch_sizes, strict=True):
        like = replace(
            row,
            configuration=LIKE_PUBLISHED,
            model=base.model,
            size=base.size,
            batch_size=batch_size,
            input_shape=base.input_shape,
            balance=None,
            steps_per_epoch=0,
            skip_epochs=0,
            link=PUBLISHED_NODE,
        )
        profiled.append(like)
        if row.devices > 1:
            again = replace(
                like,
                name=f"{row.name}/pb",
                configuration=PUBLISHED_BALANCE,
                balance=row.balance,
                published=None,
            )
            as_published.append(again)
    return (*profiled, *as_published)


def memory_rows(base: Row, table: Sizes, *, small: bool = False) -> Rows:
    """Return the rows of a memory table: plain training, and pipelines of ever larger models.

    If `small` is true, the rows have the model sizes of the small scale, and profiled balances.
    """
    rows = []
    for name, size, small_size, chunks, balance in table:
        row = replace(
            base,
            name=name,
            published=name,
            configuration="baseline" if balance is None else "pipeline",
            size=small_size if small else size,
        )
        row = _pipelined(row, chunks or base.batch_size, balance)
        if small:
            row = replace(row, balance=None)
        rows.append(row)
    return tuple(rows)


def _pipelined(row: Row, chunks: int | None, balance: Balance | None) -> Row:
    """Return a copy of a row, but with a pipeline whose partitions have the layers of `balance`.

    If `balance` is None, return the row unchanged. A pipeline checkpoints all micro-batches but the
    last. If there is only one micro-batch, it is checkpointed, too, as in the paper.
    """
    if balance is None:
        return row
    checkpoint: Checkpoint = "always" if chunks == 1 else "except_last"
    return replace(
        row, partitions=len(balance), chunks=chunks, checkpoint=checkpoint, balance=balance
    )


def controls(
    base: Row, micro_batch: int, ms: Sequence[int], balances: Mapping[int, Balance] | None
) -> Rows:
    """Return rows called controls: first those at equal batch size, then at equal micro-batch size.

    Controls separate the effect of pipelining from that of larger batches.

    Args:
        base: The settings that all controls have in common. Controls at equal batch size also have
            the batch size of `base`.
        micro_batch: The samples per micro-batch of controls at equal micro-batch size. The names of
            these controls end in `/mb`.
        ms: The numbers of micro-batches.
        balances: Maps each number of partitions to a balance (the layers of each partition). If it
            is None, each balance is found by profiling before the run.
    """
    equal_batch = []
    equal_micro_batch = []
    for row in _controls(replace(base, equal="batch"), ms):
        balance = None if balances is None else balances[row.devices]
        row = replace(row, balance=balance)
        equal_batch.append(row)
        batch_size = micro_batch * (row.chunks or 1)
        row = replace(
            row,
            name=f"{row.name}/mb",
            over=f"{row.over}/mb",
            equal="micro-batch",
            batch_size=batch_size,
        )
        equal_micro_batch.append(row)
    return (*equal_batch, *equal_micro_batch)


def _controls(base: Row, ms: Sequence[int]) -> Iterator[Row]:
    """Yield rows (configurations) of naive model parallelism, of checkpointing alone, and of GPipe.

    `ms` has the numbers of micro-batches. `base` has the settings that all rows have in common.
    """
    for n in PARTITIONS:
        name = f"naive n{n}"
        yield replace(
            base,
            name=name,
            over=name,
            configuration="naive",
            partitions=n,
            chunks=1,
            checkpoint="never",
        )
    for m in ms:
        yield replace(
            base,
            name=f"checkpoint-only m{m}",
            over=f"naive n{PARTITIONS[0]}",
            configuration="checkpoint-only",
            partitions=1,
            chunks=m,
            checkpoint="always",
        )
    for n in PARTITIONS:
        for m in ms:
            yield replace(
                base,
                name=f"GPipe n{n}m{m}",
                over=f"naive n{n}",
                configuration="GPipe",
                partitions=n,
                chunks=m,
                checkpoint="except_last",
            )
