"""Split a row of costs into consecutive partitions, the heaviest as light as it can be.

The answer is exact: costs become integers first (every finite float is a fraction), so that the least bound can be
bisected to the last unit. Whether a bound holds shows by filling partitions greedily, each with a binary search in the
prefix sums (Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm


def minimise_heaviest(costs: Iterable[float | Fraction], partitions: int) -> list[int]:
    """Return how many consecutive layers each partition takes, none empty, the heaviest as light as possible.

    Between balances with the same heaviest partition, one is taken whose other partitions are about even;
    layers that cost nothing are shared out by number.

    Args:
        costs: one non-negative finite number per layer, in any unit (int, float or Fraction).
        partitions: number of partitions, from 1 to the number of layers.

    Raises:
        TypeError: ``partitions`` is not an int.
        ValueError: ``partitions`` is out of range, or a cost is negative, infinite or NaN.
    """
    weights = _integers(list(costs))
    check_partitions(partitions, len(weights))
    prefix = list(accumulate(weights, initial=0))
    starts = _place(prefix, partitions, _least_bound(prefix, max(weights), partitions))
    _even_out(prefix, starts)
    return [stop - start for start, stop in pairwise(starts)]


def check_partitions(partitions: int, layers: int) -> None:
    """Refuse a number of partitions that this number of layers cannot fill."""
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise TypeError(f"partitions must be an int, got {partitions!r}")
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    if partitions > layers:
        raise ValueError(
            f"cannot fill {partitions} partitions with {layers} layer(s): every partition needs one, "
            f"so ask for at most {layers}"
        )


def _integers(costs: Sequence[float | Fraction]) -> list[int]:
    """Scale the costs to even integers, so that sums and halves of sums are exact."""
    ratios = []
    for layer, cost in enumerate(costs):
        # `not (0 <= cost < inf)` is also true of NaN.
        if not (0 <= cost < float("inf")):
            raise ValueError(
                f"costs must be finite and not negative, got {cost!r} for layer {layer}"
            )
        ratios.append(cost.as_integer_ratio())
    scale = 2 * lcm(*{denominator for _, denominator in ratios})
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _least_bound(prefix: Sequence[int], heaviest_layer: int, partitions: int) -> int:
    """Return the cost of the heaviest partition in the best balance."""
    low = max(heaviest_layer, -(-prefix[-1] // partitions))
    high = prefix[-1]
    while low < high:
        bound = (low + high) // 2
        if _earliest_starts(prefix, partitions, bound)[-1] == 0:
            high = bound
        else:
            low = bound + 1
    return high


def _place(prefix: Sequence[int], partitions: int, bound: int) -> list[int]:
    """Return where partitions start, at even shares of what is left, none empty or above the bound; and the end."""
    layers = len(prefix) - 1
    earliest = _earliest_starts(prefix, partitions, bound)
    starts = [0]
    for left in range(partitions - 1, 0, -1):
        start = starts[-1]
        first = max(start + 1, earliest[left])
        last = min(layers - left, bisect_right(prefix, prefix[start] + bound, start) - 1)
        share = prefix[start] + (prefix[-1] - prefix[start]) // (left + 1)
        starts.append(_cut(prefix, first, last, share, start + (layers - start) // (left + 1)))
    return [*starts, layers]


def _even_out(prefix: Sequence[int], starts: list[int]) -> None:
    """Move every cut to the middle between its neighbours, which never makes the heavier side heavier.

    Cuts placed by shares are nearly there, unless a layer heavier than its share pulled them.
    """
    for _ in starts:
        before = list(starts)
        for cut in range(1, len(starts) - 1):
            start, stop = starts[cut - 1], starts[cut + 1]
            middle = (prefix[start] + prefix[stop]) // 2
            starts[cut] = _cut(prefix, start + 1, stop - 1, middle, (start + stop) // 2)
        if starts == before:
            return


def _cut(prefix: Sequence[int], first: int, last: int, share: int, count: int) -> int:
    """Return the cut, from first to last, that is nearest to the share; of equal ones, the nearest to the count."""
    # Layers without cost make several cuts of one cost.
    return min(
        range(first, last + 1),
        key=lambda cut: (abs(prefix[cut] - share), prefix[cut], abs(cut - count)),
    )


def _earliest_starts(prefix: Sequence[int], partitions: int, bound: int) -> list[int]:
    """Return, for every k, the first layer from which k partitions under the bound reach the end."""
    earliest = [len(prefix) - 1]
    for _ in range(partitions):
        earliest.append(bisect_left(prefix, prefix[earliest[-1]] - bound, 0, earliest[-1]))
    return earliest
