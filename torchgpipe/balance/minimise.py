"""Split a row of costs into consecutive partitions, so that the heaviest is as light as possible.

The answer is exact. Costs become integers first, since every finite float is a fraction. Then the
least bound for the heaviest partition is found by bisection, down to the last unit. A bound is
possible if partitions that are filled greedily reach the end, each with a binary search in the
prefix sums (Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm


def minimise_heaviest(costs: Iterable[float | Fraction], partitions: int) -> list[int]:
    """Return how many layers each partition takes, so that the heaviest is as light as possible.

    A partition consists of consecutive layers, at least one. If several balances have the same
    heaviest partition, the returned one has other partitions of about equal cost. Layers without a
    cost are shared out by number.

    Args:
        costs: One non-negative finite number per layer, in any unit (int, float or Fraction).
        partitions: How many partitions to make, from 1 to the number of layers.

    Raises:
        TypeError: If `partitions` is not an int.
        ValueError: If `partitions` is out of range, or a cost is negative, infinite or NaN.
    """
    weights = _integers(list(costs))
    check_partitions(partitions, len(weights))
    prefix = list(accumulate(weights, initial=0))
    bound = _least_bound(prefix, max(weights), partitions)
    starts = _place(prefix, partitions, bound)
    _even_out(prefix, starts)
    return [stop - start for start, stop in pairwise(starts)]


def check_partitions(partitions: int, layers: int) -> None:
    """Refuse a number of partitions that so many layers cannot fill."""
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise TypeError(f"partitions must be an int, got {partitions!r}")
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    if partitions > layers:
        raise ValueError(
            f"cannot fill {partitions} partitions with {layers} layer(s): "
            f"every partition needs one, so ask for at most {layers}"
        )


def _integers(costs: Sequence[float | Fraction]) -> list[int]:
    """Scale the costs to even integers, so that sums and halves of sums are exact."""
    numerators: list[int] = []
    denominators: list[int] = []
    for layer, cost in enumerate(costs):
        # `not (0 <= cost < inf)` is also true of NaN.
        if not (0 <= cost < float("inf")):
            raise ValueError(
                f"costs must be finite and not negative, got {cost!r} for layer {layer}"
            )
        numerator, denominator = cost.as_integer_ratio()
        numerators.append(numerator)
        denominators.append(denominator)
    common = 2 * lcm(*set(denominators))
    ratios = zip(numerators, denominators, strict=True)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _least_bound(prefix: Sequence[int], heaviest_layer: int, partitions: int) -> int:
    """Return the cost of the heaviest partition in the best balance."""
    total = prefix[-1]
    mean = -(-total // partitions)  # rounded up
    low = max(heaviest_layer, mean)
    high = total
    while low < high:
        bound = (low + high) // 2
        earliest = _earliest_starts(prefix, partitions, bound)
        if earliest[-1] == 0:
            high = bound
        else:
            low = bound + 1
    return high


def _place(prefix: Sequence[int], partitions: int, bound: int) -> list[int]:
    """Return where partitions start, and the number of layers as the end.

    Each partition takes about an even share of what is left, and costs no more than the bound.
    """
    layers = len(prefix) - 1
    earliest = _earliest_starts(prefix, partitions, bound)
    starts = [0]
    for left in range(partitions - 1, 0, -1):
        start = starts[-1]
        before = prefix[start]
        first = max(start + 1, earliest[left])
        fullest = bisect_right(prefix, before + bound, start) - 1
        last = min(layers - left, fullest)
        share = before + (prefix[-1] - before) // (left + 1)
        count = start + (layers - start) // (left + 1)
        starts.append(_cut(prefix, first, last, share, count))
    return [*starts, layers]


def _even_out(prefix: Sequence[int], starts: list[int]) -> None:
    """Move every cut to the middle between its neighbours.

    That never makes the heavier side heavier. A cut is nearly in the middle before, unless a layer
    that is heavier than a share pulled it away.
    """
    for _ in starts:
        before = list(starts)
        for cut in range(1, len(starts) - 1):
            start, stop = starts[cut - 1], starts[cut + 1]
            middle = (prefix[start] + prefix[stop]) // 2
            count = (start + stop) // 2
            starts[cut] = _cut(prefix, start + 1, stop - 1, middle, count)
        if starts == before:
            return


def _cut(prefix: Sequence[int], first: int, last: int, share: int, count: int) -> int:
    """Return the cut from `first` to `last` whose prefix sum is nearest to the share.

    Layers without a cost make several such cuts. Then the cut nearest to the count is returned.
    """

    def distance(cut: int) -> tuple[int, int, int]:
        return abs(prefix[cut] - share), prefix[cut], abs(cut - count)

    return min(range(first, last + 1), key=distance)


def _earliest_starts(prefix: Sequence[int], partitions: int, bound: int) -> list[int]:
    """Return by k the first layer from which k partitions under the bound reach the end."""
    earliest = [len(prefix) - 1]
    for _ in range(partitions):
        end = earliest[-1]
        earliest.append(bisect_left(prefix, prefix[end] - bound, 0, end))
    return earliest
