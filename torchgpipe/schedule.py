"""`clock_cycles` of torchgpipe 0.0.7; pipelines use `torchgpipe.schedules` instead."""

from collections.abc import Iterator


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield a list of tasks for each clock cycle of GPipe's forward.

    A task (i, j) runs micro-batch i < m on partition j < n. Cycle k has all tasks with i + j = k,
    in ascending order of j. There are m + n - 1 cycles (torchgpipe paper, section 3.2.1).
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]
