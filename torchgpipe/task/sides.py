"""Find the matrix products in a task's graph whose weight gradients can be computed later.

The part of the graph from a parameter to a product is called a side. It is the parameter alone, or
the parameter with its transpose or its cast. A weight gradient can be computed later if only the
product uses the side. The file halves.py computes the gradients.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from torchgpipe.tensors._autograd import ONLY_WHOLE, reads_saved

# For each class of nodes of matrix products: the index of the first factor, and the names of both.
PRODUCTS = {
    "MmBackward0": (0, "self", "mat2"),
    "AddmmBackward0": (1, "mat1", "mat2"),
    "BmmBackward0": (0, "self", "mat2"),
    "BaddbmmBackward0": (1, "batch1", "batch2"),
    "ConvolutionBackward0": (0, "input", "weight"),
}

Row = tuple[type, bool | None, tuple[int, ...]]
"""A node of a graph: its class, whether its saved tensors can be read, and its next nodes.

The second entry is `None` if the node is not a matrix product. Next nodes are given by their
numbers, and -1 stands for no node.
"""

REENTRANT = (
    "torch.utils.checkpoint(use_reentrant=True) in a layer goes backward for all leaves at once; "
    "use_reentrant=False can be split"
)
PACKED = (
    "what a layer saves is packed (torch.utils.checkpoint, saved_tensors_hooks), or no plain tensor"
)


class Split(NamedTuple):
    """How to split the backward of a graph into two halves: what is computed in which half.

    Nodes are given by their numbers, from `numbered`. So one split is valid for all graphs with the
    same structure.

    Attributes:
        later: The nodes of the matrix products whose weight gradients are computed in the second
            half. With each node are the indices of the arguments that get these gradients.
        now: The nodes at which the first half ends: those leaves of the graph that are in no side
            (the part of the graph from a parameter to a product).
        reasons: Reasons why other matrix products get their weight gradients in the first half.
    """

    later: list[tuple[int, list[int]]]
    now: list[int]
    reasons: list[str]


NO_SPLIT = Split([], [], [])


def numbered(roots: Iterable[GradientEdge]) -> tuple[list[Any], tuple[Row, ...]]:
    """List the nodes of the graph behind `roots`; return the nodes, and a description of each.

    The position of a node in the list is its number. The descriptions (`Row`) of two graphs are
    equal if the graphs have the same structure.
    """
    nodes: list[Any] = list(dict.fromkeys([edge.node for edge in roots]))
    numbers = {node: k for k, node in enumerate(nodes)}
    rows = []
    for node in nodes:  # the list grows meanwhile
        below = []
        for child, _ in node.next_functions:
            k = -1 if child is None else numbers.setdefault(child, len(nodes))
            if k == len(nodes):
                nodes.append(child)
            below.append(k)
        product = PRODUCTS.get(type(node).__name__)
        readable = None if product is None else reads_saved(node, product[1:])
        rows.append((type(node), readable, tuple(below)))
    return nodes, tuple(rows)


def find_split(rows: Sequence[Row], begins: Iterable[int], named: Sequence[str]) -> Split:
    """Find the matrix products of a graph whose weight gradients can be computed later.

    Args:
        rows: The structure of the graph: a description of each node, from `numbered`.
        begins: The numbers of the nodes at which backward begins.
        named: For each node that accumulates the gradient of a parameter or buffer, the name of
            this tensor. For all other nodes, an empty text.
    """
    if any(kind.__name__ in ONLY_WHOLE for kind, _, _ in rows):
        return Split([], [], [REENTRANT])
    return _Splitter(rows, begins, named).split()


class _Splitter:
    def __init__(self, rows: Sequence[Row], begins: Iterable[int], named: Sequence[str]) -> None:
        self._rows = rows
        self._named = named
        self._next = []
        for _, _, below in rows:
            self._next.append([x for x in below if x >= 0])
        # A custom Function may do anything, and the entrance of a task is one.
        self._custom = [issubclass(kind, BackwardCFunction) for kind, _, _ in rows]
        self._uses = Counter(begins)
        for following in self._next:
            self._uses.update(following)
        self._reasons: dict[str, None] = {}
        self._custom_grads: dict[str, list[str]] = {}  # by class, the names of the parameters

    def split(self) -> Split:
        """Return how the backward is split."""
        later = []
        aside: set[int] = set()
        for k, (kind, readable, below) in enumerate(self._rows):
            if readable is False:
                self._reasons[PACKED] = None
            if self._custom[k]:
                self._note_custom(k)
            sides: dict[int, set[int]] = {}
            if readable:
                for place, begin in enumerate(below):
                    found = self._side(begin)
                    if found:
                        sides[place] = found
            if readable and _is_worth(kind.__name__, below, sides):
                later.append((k, list(sides)))
                aside.update(*sides.values())
        now = []
        for k, following in enumerate(self._next):
            if not following and k not in aside:
                now.append(k)
        reasons = [*self._reasons, *map(_by_a_custom_function, self._custom_grads.items())]
        return Split(later, now, reasons)

    def _side(self, begin: int) -> set[int]:
        """Return the node `begin` and all nodes behind it, if only one matrix product needs them.

        Such nodes are called a side: they compute one factor of the product. Only one edge may lead
        to them from the rest of the graph. None of them may be a matrix product or a custom
        Function. If they are no side, the result is an empty set.
        """
        found = [begin] if begin >= 0 else []
        for k in found:  # the list grows meanwhile
            _, readable, _ = self._rows[k]
            if readable is not None or self._custom[k]:
                return set()
            for x in dict.fromkeys(self._next[k]):
                if x not in found:
                    found.append(x)
        within = 0
        uses = 0
        for k in found:
            within += len(self._next[k])
            uses += self._uses[k]
        if uses == within + 1:  # nothing else leads there
            return set(found)
        if len(found) == within + 1:  # a chain, which ends in a leaf
            self._reasons[f"{self._named[found[-1]]!r} is used more than once"] = None
        return set()

    def _note_custom(self, k: int) -> None:
        kind, _, _ = self._rows[k]
        for x in self._next[k]:
            if self._named[x]:
                self._custom_grads.setdefault(kind.__name__, []).append(self._named[x])


def _by_a_custom_function(grads: tuple[str, Sequence[str]]) -> str:
    """Return a text which says that some parameters get their gradients from a custom Function.

    Args:
        grads: The class of the Function, and the names of the parameters.
    """
    kind, parameters = grads
    source = f"a custom Function ({kind})"
    if kind == "CompiledFunctionBackward":
        source = "a compiled layer, whose backward cannot be split"
    first = parameters[0]
    if len(parameters) == 1:
        return f"{first!r} has its gradient from {source}"
    return f"{len(parameters)} parameters, such as {first!r}, have their gradients from {source}"


def _is_worth(name: str, below: Sequence[int], sides: Mapping[int, object]) -> bool:
    """Return whether it saves time to compute the weight gradients of a matrix product later.

    Args:
        name: The name of the class of the product's autograd node.
        below: For each argument of the product, the number of the graph node that takes the
            argument's gradient. It is -1 if the argument requires no grad.
        sides: The arguments whose gradients can be computed later are the keys of this dictionary.
    """
    # For a bias alone, adding up its gradient costs less than keeping the tensors for later.
    first = PRODUCTS[name][0]
    if first not in sides and first + 1 not in sides:
        return False
    if name != "ConvolutionBackward0":
        return True
    # One kernel gives the gradients of a filter and its bias.
    return all(below[place] < 0 or place in sides for place in (1, 2))
