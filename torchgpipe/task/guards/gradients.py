"""Which outputs of a task take a gradient, which a first pass without a graph does not say.

What goes wrong without it: a layer returns an index beside its output, or detaches one of two
outputs. The next task would compute gradients that plain layers do not compute, or autograd would
wait for gradients that never come.

So the first task of a kind makes a graph, and drops it. If all outputs that can take a gradient do
so, later tasks of that kind run without a graph, and claim the same. If not, each of them makes a
graph to find out. A recomputation corrects what was claimed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from torchgpipe.task.guards.guard import Context, Guard, GuardedTask, Nested
from torchgpipe.task.guards.parameters import READS_GRADIENT
from torchgpipe.tensors._autograd import packs_saved_tensors
from torchgpipe.tensors.microbatch import Flat

Needs = tuple[bool, ...]
"""Which inputs of a task take a gradient."""


class OutputGradients(Guard):
    """Which outputs of a stage's tasks take a gradient.

    Args:
        all_do: What is known of tasks, by which inputs take a gradient: whether all outputs do that
            can. Mini-batches share it, for as long as modes of layers, and which parameters take
            gradients, stay alike.
        ids: The ids of parameters and stand-ins.
        begins_in_place: Whether the first layer changes its input in place.
    """

    def __init__(self, all_do: dict[Needs, bool], ids: set[int], begins_in_place: bool) -> None:
        self._all_do = all_do
        self._ids = ids
        self._begins_in_place = begins_in_place

    def before_first_pass(self, task: GuardedTask) -> Context | None:
        """Say whether the task needs a graph, and watch what the layers of the first one ask."""
        task.with_graph = not self._all_do.get(task.needs, False)
        if not task.with_graph:
            return None
        contexts: list[Context] = []
        if packs_saved_tensors(True):
            # Or what is around the pipeline, such as torch.utils.checkpoint, would count what the
            # graph saves.
            contexts.append(saved_tensors_hooks(Tensor.detach, lambda x: x))
        if task.needs not in self._all_do:
            task.noted[self] = _Asks(self._ids)
            contexts.append(task.noted[self])
        return Nested(contexts) if contexts else None

    def claim(self, task: GuardedTask, given: Flat, outputs: Flat) -> list[bool]:
        """Return which of the `outputs` of layers that were `given` inputs take a gradient."""
        # An output that is an input takes a gradient exactly if that input does, but not one that
        # is changed in place.
        handed_on: dict[int, bool] = {}
        for x, need in zip(given, task.needs, strict=True):
            handed_on[id(x)] = need
        if self._begins_in_place and task.form is Tensor:
            handed_on.pop(id(given[0]), None)
        able = []
        for y in outputs:
            can_take = y is not None and (y.is_floating_point() or y.is_complex())
            able.append(handed_on.get(id(y), can_take))
        if not task.with_graph:
            return able
        watched = task.noted.pop(self, None)
        if watched is not None:
            self._all_do[task.needs] = task.found == able and not watched.asked
        return task.found

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Correct what is known, if other outputs take a gradient than the first pass claimed."""
        if task.claimed != task.found:
            self._all_do[task.needs] = False


class _Asks(TorchFunctionMode):
    """Note whether layers ask which tensors take gradients, or for gradients.

    Without a graph no tensor would take a gradient. Reading the gradient of a parameter, one of
    `ids`, raises `RuntimeError`.
    """

    only_watches = True
    asked = False
    properties = (
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
        Tensor.grad_fn.__get__,  # type: ignore[union-attr]
        Tensor.grad.__get__,  # type: ignore[union-attr]
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
