"""Formulas for numbers that depend on the batch size and on the lengths of a module's inputs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import lcm, prod

Sizes = tuple[int, ...]
"""A batch size, and then the length of each dimension whose length may change."""

Term = tuple[int, tuple[int, ...]]
"""A factor, and the indices of the sizes that it is multiplied with; index 0 is the batch size."""


@dataclass(frozen=True)
class Size:
    """A formula for a number that depends on sizes: on the batch size, and on lengths of inputs.

    The formula is a sum of products of sizes, such as `2 * batch * length + 1`, divided by a whole
    number and rounded down. In recorded calls, the formula stands in the place of the number.

    Attributes:
        terms: The products. Each has a factor, and the indices of the sizes to multiply; index 0
            is the batch size.
        over: The number that the sum is divided by.
    """

    terms: tuple[Term, ...]
    over: int = 1

    def at(self, sizes: Sizes) -> int:
        """Return the number for these sizes."""
        total = 0
        for factor, chosen in self.terms:
            total += factor * prod([sizes[k] for k in chosen])
        return total // self.over

    @property
    def uses(self) -> set[int]:
        """The indices of the sizes that the formula uses; index 0 is the batch size."""
        found: set[int] = set()
        for _, chosen in self.terms:
            found.update(chosen)
        return found

    def text(self, names: Sequence[str]) -> str:
        """Return the formula as Python code, such as `2 * batch + 1`.

        Args:
            names: The name of the variable for each size.
        """
        products = []
        for factor, chosen in self.terms:
            factors = [names[k] for k in chosen]
            if factor != 1 or not chosen:
                factors.insert(0, str(factor))
            products.append(" * ".join(factors))
        total = " + ".join(products).replace("+ -", "- ")
        return total if self.over == 1 else f"({total}) // {self.over}"


def fitted(numbers: Sequence[int], points: Sequence[Sizes]) -> Size | None:
    """Find a formula that computes a recorded number from sizes; return `None` if there is none.

    A module was recorded at several points. A point consists of k sizes: the batch size, and each
    length that may change. The first 2^k points determine the formula, and all other points test
    it.

    Args:
        numbers: The number that was recorded at each point.
        points: The sizes at each point. The first points are the corners of a grid, as from
            `corners`.
    """
    count = len(points[0])
    low, high = points[0], points[2**count - 1]
    at = dict(zip(points, numbers, strict=True))
    factors: dict[tuple[int, ...], Fraction] = {}
    for chosen in _subsets(range(count)):
        # The coefficient of the product of all (size - low) in `chosen`, by divided differences.
        difference = 0
        for changed in _subsets(chosen):
            sign = (-1) ** (len(chosen) - len(changed))
            corner = tuple([high[k] if k in changed else low[k] for k in range(count)])
            difference += sign * at[corner]
        coefficient = Fraction(difference, prod([high[k] - low[k] for k in chosen]))
        # This product is expanded into products of sizes.
        for changed in _subsets(chosen):
            others = prod([-low[k] for k in chosen if k not in changed])
            factors[changed] = factors.get(changed, Fraction(0)) + coefficient * others
    over = lcm(*[factor.denominator for factor in factors.values()])
    terms: list[Term] = []
    for chosen in sorted(factors, key=lambda chosen: (-len(chosen), chosen)):
        factor = factors[chosen]
        if factor:
            terms.append((int(factor * over), chosen))
    size = Size(tuple(terms) or ((0, ()),), over)
    found = [size.at(point) for point in points]
    return size if found == list(numbers) else None


def corners(lengths: Iterable[tuple[int, int, int]]) -> list[Sizes]:
    """Return the points at which to record a module: batch sizes and lengths of its inputs.

    Args:
        lengths: Three values of the batch size, and three of each length that may change.

    Returns:
        A list of points. First come all combinations of the first and the second value of each
        size. They determine the formula that `fitted` finds. Then comes one point with all third
        values, which tests the formula.
    """
    grid: list[Sizes] = [()]
    last: Sizes = ()
    for first, second, third in lengths:
        lower = [(*sizes, first) for sizes in grid]
        upper = [(*sizes, second) for sizes in grid]
        grid = lower + upper
        last = (*last, third)
    return [*grid, last]


def _subsets(indices: Iterable[int]) -> Iterator[tuple[int, ...]]:
    members = tuple(indices)
    for count in range(len(members) + 1):
        yield from combinations(members, count)
