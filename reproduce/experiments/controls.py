"""List rows by rule: the published ones of n partitions, and beside them controls that nobody has published.

The published rows vary the batch with n and m, so they mix pipelining with larger batches. The controls are naive
model parallelism, checkpoint-only and GPipe, and keep one thing equal:

- the batch size: every row does the same work on the same samples, in more or in fewer parts;
- the micro-batch size: every task of every row is as large, so kernels are as efficient, and the batch grows with m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from reproduce.experiments.row import AS_PUBLISHED, LIKE_PUBLISHED, PUBLISHED_BALANCE, PUBLISHED_NODE, Row

PARTITIONS = (2, 4, 8)

Balance = tuple[int, ...]
Balances = Mapping[int, Balance]  # by the number of partitions

# name, m, batch size, balance; the first row is plain training
Published = Sequence[tuple[str, int | None, int, Balance | None]]
# name, model's size as published and at the small scale, m (None: micro-batches of one), balance; the first likewise
Sizes = Sequence[tuple[str, tuple[int, ...], tuple[int, ...], int | None, Balance | None]]


def published_rows(base: Row, table: Published, samples: int) -> tuple[Row, ...]:
    """List plain training and pipelines of n partitions, at batch sizes of their own.

    `samples` make an epoch, of which the published timing leaves out the first.
    """
    base = replace(base, configuration=AS_PUBLISHED, over=table[0][0], skip_epochs=1)
    return tuple(
        _pipelined(
            replace(base, name=name, published=name, batch_size=size, steps_per_epoch=math.ceil(samples / size)),
            chunks, balance,
        )
        for name, chunks, size, balance in table
    )  # fmt: skip


def smaller(rows: Sequence[Row], base: Row, batch_sizes: Sequence[int]) -> tuple[Row, ...]:
    """List rows like the published `rows`, of `base`'s smaller model and at smaller batch sizes.

    Their balance is profiled, as the published one was on its own hardware. All but those of one partition come a
    second time, in the published balance.
    """
    like = [
        replace(row, configuration=LIKE_PUBLISHED, model=base.model, size=base.size, input_shape=base.input_shape,
                batch_size=batch_size, balance=None, steps_per_epoch=0, skip_epochs=0, link=PUBLISHED_NODE)
        for row, batch_size in zip(rows, batch_sizes, strict=True)
    ]  # fmt: skip
    return (
        *like,
        *(replace(row, name=f"{row.name}/pb", configuration=PUBLISHED_BALANCE, balance=theirs.balance, published=None)
          for row, theirs in zip(like, rows, strict=True) if row.devices > 1),
    )  # fmt: skip


def memory_rows(base: Row, table: Sizes, *, small: bool = False) -> tuple[Row, ...]:
    """List plain training and pipelines of n partitions, each with a larger model."""
    rows = []
    for name, size, small_size, chunks, balance in table:
        configuration = "baseline" if balance is None else "pipeline"
        row = replace(base, name=name, published=name, configuration=configuration, size=small_size if small else size)
        row = _pipelined(row, chunks or base.batch_size, balance)
        rows.append(replace(row, balance=None) if small else row)
    return tuple(rows)


def _pipelined(row: Row, chunks: int | None, balance: Balance | None) -> Row:
    """Return the row in the partitions of `balance`; None: without any."""
    if balance is None:
        return row
    return replace(row, partitions=len(balance), chunks=chunks, checkpoint="except_last", balance=balance)


def controls(base: Row, micro_batch: int, chunks: Sequence[int], balances: Balances | None) -> tuple[Row, ...]:
    """List the controls, first at `base`'s batch size, then in micro-batches of `micro_batch`; those end in `/mb`.

    Where `balances` is None they are profiled.
    """
    equal = _at_equal_batch(replace(base, equal="batch"), chunks)
    micro = [
        replace(row, name=f"{row.name}/mb", over=f"{row.over}/mb", equal="micro-batch",
                batch_size=micro_batch * (row.chunks or 1))
        for row in equal
    ]  # fmt: skip
    return tuple(replace(row, balance=None if balances is None else balances[row.devices]) for row in (*equal, *micro))


def _at_equal_batch(base: Row, chunks: Sequence[int]) -> list[Row]:
    return [
        replace(base, configuration="naive", partitions=n, chunks=1, checkpoint="never", name=f"naive n{n}",
                over=f"naive n{n}")
        for n in PARTITIONS
    ] + [
        replace(base, configuration="checkpoint-only", partitions=1, chunks=m, checkpoint="always",
                name=f"checkpoint-only m{m}", over=f"naive n{PARTITIONS[0]}")
        for m in chunks
    ] + [
        replace(base, configuration="GPipe", partitions=n, chunks=m, checkpoint="except_last", name=f"GPipe n{n}m{m}",
                over=f"naive n{n}")
        for n in PARTITIONS
        for m in chunks
    ]  # fmt: skip
