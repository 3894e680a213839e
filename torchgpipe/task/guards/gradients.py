"""Which outputs of a task take a gradient, which a first pass without a graph does not say.

What goes wrong without it: a layer returns an index beside its output, or detaches one of two outputs. The next task
would compute gradients that plain layers do not, or autograd would wait for some that never come.

So the first task of a kind makes a graph, and drops it. If all outputs that can take a gradient do, later tasks of that
kind claim it; if not, each of them finds out. A recomputation corrects what was claimed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe.task.guards.parameters import READS_GRADIENT
from torchgpipe.tensors.microbatch import Flat
from torchgpipe.tensors.observe import NOTHING

Needs = tuple[bool, ...]
"""Which inputs of a task take a gradient."""


class OutputGradients:
    """What is known of a partition's tasks, while modes of layers, and which parameters take gradients, stay alike."""

    def __init__(self) -> None:
        self._all_do: dict[Needs, bool] = {}  # whether all outputs that can take a gradient do

    def are_known(self, needs: Needs) -> bool:
        """Return whether tasks with such inputs can run without a graph."""
        return self._all_do.get(needs, False)

    def watching(self, needs: Needs, ids: set[int]) -> AbstractContextManager[Any]:
        """Return a context for the layers: for the first task with such inputs, it notes what they ask."""
        return _Asks(ids) if needs not in self._all_do else NOTHING

    def learn(
        self, needs: Needs, found: Sequence[bool], able: Sequence[bool], watched: object
    ) -> None:
        """Note which outputs take a gradient, of those that can; `watched` is the context that the layers ran in."""
        asked = getattr(watched, "asked", False)
        self._all_do.setdefault(needs, found == able and not asked)

    def correct(self, needs: Needs) -> None:
        """Note that a layer does otherwise than was claimed."""
        self._all_do[needs] = False


def able_to_take(outputs: Flat, unchanged: dict[int, bool]) -> list[bool]:
    """Return which outputs can take a gradient; for inputs that are handed on `unchanged` has whether they do."""
    return [
        unchanged.get(id(y), y is not None and (y.is_floating_point() or y.is_complex()))
        for y in outputs
    ]


class _Asks(TorchFunctionMode):
    """Note whether layers ask which tensors take gradients, or for gradients: without a graph, none would.

    Raise `RuntimeError` if they read the gradient of a parameter, one of `ids`.
    """

    only_watches = True
    asked, properties = (
        False,
        {getattr(Tensor, x).__get__ for x in ("requires_grad", "is_leaf", "grad_fn", "grad")},
    )
    # By name: torch.compile, which runs this, too, cannot look a function up in a set.
    functions = ("grad", "register_hook", "retain_grad", "numpy", "__deepcopy__", "__repr__")

    def __init__(self, ids: set[int]) -> None:
        super().__init__()
        self._ids = ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ_GRADIENT and id(args[0]) in self._ids:
            raise RuntimeError(READS_GRADIENT)
        self.asked |= func in self.properties or getattr(func, "__name__", "") in self.functions
        return func(*args, **(kwargs or {}))


_READ_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
