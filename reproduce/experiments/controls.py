"""List rows by rule: the published ones of n partitions, and beside them controls that nobody has published.

The published rows vary the batch with n and m, so they mix pipelining with larger batches. The controls are naive
model parallelism, checkpoint-only and GPipe, and keep one thing equal:

- the batch size: every row does the same work on the same samples, in more or in fewer parts;
- the micro-batch size: every task of every row is as large, so kernels are as efficient, and the batch grows with m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from reproduce.experiments.row import AS_PUBLISHED, LIKE_PUBLISHED, Row

PARTITIONS = (2, 4, 8)

Balance = tuple[int, ...]
Balances = Mapping[int, Balance]  # by the number of partitions

# name, m, batch size as published and at the small scale, balance; the first row is plain training
Published = Sequence[tuple[str, int | None, int, int, Balance | None]]
# name, model's size as published and at the small scale, m (None: micro-batches of one), balance; the first likewise
Sizes = Sequence[tuple[str, tuple[int, ...], tuple[int, ...], int | None, Balance | None]]


def published_rows(base: Row, table: Published, samples: int, *, small: bool = False) -> tuple[Row, ...]:
    """List plain training and pipelines of n partitions, at batch sizes of their own.

    `samples` make an epoch, of which the published timing leaves out the first.
    """
    base = replace(base, configuration=LIKE_PUBLISHED if small else AS_PUBLISHED, over=table[0][0])
    rows = []
    for name, chunks, batch_size, small_batch_size, balance in table:
        row = replace(base, name=name, published=name, batch_size=small_batch_size if small else batch_size)
        if not small:
            row = replace(row, steps_per_epoch=math.ceil(samples / batch_size), skip_epochs=1)
        rows.append(_pipelined(row, chunks, balance, small=small))
    return tuple(rows)


def memory_rows(base: Row, table: Sizes, *, small: bool = False) -> tuple[Row, ...]:
    """List plain training and pipelines of n partitions, each with a larger model."""
    rows = []
    for name, size, small_size, chunks, balance in table:
        configuration = "baseline" if balance is None else "pipeline"
        row = replace(base, name=name, published=name, configuration=configuration, size=small_size if small else size)
        rows.append(_pipelined(row, chunks or base.batch_size, balance, small=small))
    return tuple(rows)


def _pipelined(row: Row, chunks: int | None, balance: Balance | None, *, small: bool) -> Row:
    """Return the row in the partitions of `balance`, which is profiled anew for a small model; None: without any."""
    if balance is None:
        return row
    return replace(
        row, partitions=len(balance), chunks=chunks, checkpoint="except_last", balance=None if small else balance
    )


def controls(
    base: Row,
    micro_batch: int,
    chunks: Sequence[int],
    balances: Balances | None,
    published: Callable[[int, int], str | None] = lambda n, m: None,
) -> tuple[Row, ...]:
    """List the controls, first at `base`'s batch size, then in micro-batches of `micro_batch`; those end in `/mb`.

    Where `balances` is None they are profiled. `published` names the published row that has n and m like one of ours.
    """
    equal = _at_equal_batch(replace(base, equal="batch"), chunks, published)
    micro = [
        replace(row, name=f"{row.name}/mb", over=f"{row.over}/mb", equal="micro-batch", published=None,
                batch_size=micro_batch * (row.chunks or 1))
        for row in equal
    ]  # fmt: skip
    return tuple(replace(row, balance=None if balances is None else balances[row.devices]) for row in (*equal, *micro))


def _at_equal_batch(base: Row, chunks: Sequence[int], published: Callable[[int, int], str | None]) -> list[Row]:
    return [
        replace(base, configuration="naive", partitions=n, chunks=1, checkpoint="never", name=f"naive n{n}",
                over=f"naive n{n}", published=published(n, 1))
        for n in PARTITIONS
    ] + [
        replace(base, configuration="checkpoint-only", partitions=1, chunks=m, checkpoint="always",
                name=f"checkpoint-only m{m}", over=f"naive n{PARTITIONS[0]}")
        for m in chunks
    ] + [
        replace(base, configuration="GPipe", partitions=n, chunks=m, checkpoint="except_last", name=f"GPipe n{n}m{m}",
                over=f"naive n{n}", published=published(n, m))
        for n in PARTITIONS
        for m in chunks
    ]  # fmt: skip
