"""Clock cycles of tasks, as a function of 0.0.7; `torchgpipe.schedules` has what pipelines do."""

from collections.abc import Iterator


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, cycle by cycle, the tasks (i, j) with i + j = k: micro-batch i < m on partition j < n.

    There are m + n - 1 cycles. Within a cycle, partitions are in ascending order (torchgpipe paper,
    section 3.2.1).
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]
