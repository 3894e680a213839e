"""Define `clock_cycles`, for code written for torchgpipe 0.0.7; this library does not use it."""

from collections.abc import Iterator


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield a list of tasks for each clock cycle of GPipe's forward (torchgpipe paper, 3.2.1).

    In one clock cycle, each partition can run one micro-batch. There are m micro-batches, n
    partitions and m + n - 1 cycles. Task (i, j) is the forward of micro-batch i on partition j.
    Cycle k has all tasks with i + j = k, in ascending order of j.
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]
