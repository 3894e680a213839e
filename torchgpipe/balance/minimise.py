"""Split a list of layers' costs into partitions, so that the heaviest costs as little as possible.

1. Multiply the costs by a number that makes them all integers, so that sums are exact. This is
   possible because every finite float is a fraction.
2. A bound is a cost that no partition may exceed. Find the lowest bound with which all layers still
   fit into the partitions, by bisection.

To test a bound, the partitions are filled from the end of the list. Each partition takes as many
layers as the bound allows. A binary search in the costs' prefix sums finds this number. The bound
is high enough if the partitions take all layers (Pinar and Aykanat, "Fast optimal load balancing
algorithms for 1D partitioning", 2004).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

from torchgpipe.caught import how_many


def minimise_heaviest(costs: Iterable[float | Fraction], partitions: int) -> list[int]:
    """Return the balance whose heaviest partition costs as little as possible.

    A balance is a list with the number of layers of each partition. A partition has consecutive
    layers, at least one. If several balances are equally good, the function returns one in which
    the other partitions cost about the same. Layers that cost nothing are spread over partitions in
    about equal numbers.

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
    """Raise an error unless `partitions` is an int from 1 to `layers`, the number of layers."""
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise TypeError(f"partitions must be an int, got {partitions!r}")
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    if partitions > layers:
        raise ValueError(
            f"cannot fill {how_many(partitions, 'partition')} with {how_many(layers, 'layer')}: "
            f"every partition needs at least one layer; set partitions to at most {layers}"
        )


def _integers(costs: Sequence[float | Fraction]) -> list[int]:
    """Multiply all costs by one number that makes them even integers, and return the integers.

    Unlike floats, even integers can be added up, and the sums halved, without rounding.
    """
    numerators: list[int] = []
    denominators: list[int] = []
    for layer, cost in enumerate(costs):
        # `not (0 <= cost < inf)` is also true if the cost is NaN.
        if not (0 <= cost < float("inf")):
            raise ValueError(
                f"costs must be finite numbers and not negative, but got {cost!r} for layer {layer}"
            )
        numerator, denominator = cost.as_integer_ratio()
        numerators.append(numerator)
        denominators.append(denominator)
    common = 2 * lcm(*set(denominators))
    ratios = zip(numerators, denominators, strict=True)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _least_bound(prefix: Sequence[int], heaviest_layer: int, partitions: int) -> int:
    """Return the cost of the heaviest partition in the best balance.

    Args:
        prefix: The prefix sums of the costs: entry k is the cost of the first k layers.
        heaviest_layer: The cost of the most expensive layer.
        partitions: How many partitions to make.
    """
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
    """Return the index of each partition's first layer, followed by the number of layers.

    Partitions are filled from first to last. While k partitions are still empty, the next one gets
    about 1/k of the remaining cost, so that all partitions cost about the same. No partition costs
    more than `bound`.
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
    """Move the borders between partitions, so that neighbouring partitions cost about the same.

    `starts` has the index of each partition's first layer, and is changed in place. Each border is
    moved to the place that divides the cost of its two partitions most evenly. All borders are
    moved in turn, until no border moves any more, but at most `len(starts)` times.
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
    """Return a border from `first` to `last`: the layers before it cost about `share` together.

    A border is the index of the first layer after it. The prefix sum at this index is the cost of
    all layers before the border. If several borders are equally good, because layers between them
    cost nothing, the function returns the border nearest to the index `count`.
    """

    def distance(cut: int) -> tuple[int, int, int]:
        return abs(prefix[cut] - share), prefix[cut], abs(cut - count)

    return min(range(first, last + 1), key=distance)


def _earliest_starts(prefix: Sequence[int], partitions: int, bound: int) -> list[int]:
    """Return, for k up to `partitions`, the lowest index at which the last k partitions can start.

    Entry k of the list is such an index: k partitions can take all layers from this index to the
    end of the list of layers, and no partition costs more than `bound`. From any lower index on,
    they cannot.
    """
    earliest = [len(prefix) - 1]
    for _ in range(partitions):
        end = earliest[-1]
        earliest.append(bisect_left(prefix, prefix[end] - bound, 0, end))
    return earliest
