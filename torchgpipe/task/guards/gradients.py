"""Find out which outputs of a task require grad, if its first pass runs without a graph.

What goes wrong without it: a layer also returns an integer tensor, or detaches one of two
outputs. The next task would compute gradients that the layers do not compute without a pipeline, or
autograd would wait for gradients that never come.

Tasks are of the same kind if the same inputs require grad. The first task of each kind makes a
graph, and frees the graph. If all floating-point outputs of this task require grad, later tasks of
the same kind run without a graph, and claim that their outputs require grad, too. Otherwise, each
later task makes a graph to find out. If a recomputation shows that a claim was wrong, later tasks
make a graph again.
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
"""Whether each input of a task requires grad."""


class OutputGradients(Guard):
    """The guard that finds out which outputs of a stage's tasks require grad.

    Args:
        all_do: What earlier tasks have shown. A key says which inputs of a task require grad. The
            value says whether all floating-point outputs require grad in this case. Mini-batches
            share this dictionary, until a layer's training mode or a parameter's `requires_grad`
            changes.
        ids: The ids of parameters and of stand-ins (detached parameters that tasks use).
        begins_in_place: Whether the first layer changes its input in place.
    """

    def __init__(self, all_do: dict[Needs, bool], ids: set[int], begins_in_place: bool) -> None:
        self._all_do = all_do
        self._ids = ids
        self._begins_in_place = begins_in_place

    def before_first_pass(self, task: GuardedTask) -> Context | None:
        """Decide whether the task makes a graph in its forward.

        For the first task of its kind, return a context that records whether layers read gradients
        or `requires_grad`.
        """
        task.with_graph = not self._all_do.get(task.needs, False)
        if not task.with_graph:
            return None
        contexts: list[Context] = []
        if packs_saved_tensors(True):
            # Hide the tensors that the graph saves from saved-tensor hooks around the pipeline,
            # such as those of torch.utils.checkpoint.
            contexts.append(saved_tensors_hooks(Tensor.detach, lambda x: x))
        if task.needs not in self._all_do:
            task.noted[self] = _Asks(self._ids)
            contexts.append(task.noted[self])
        return Nested(contexts) if contexts else None

    def claim(self, task: GuardedTask, given: Flat, outputs: Flat) -> list[bool]:
        """Return whether each output requires grad, or is assumed to.

        If the layers have made no graph, this method assumes that each floating-point output
        requires grad. `given` are the inputs of the layers.
        """
        # An output that is also an input requires grad exactly if that input does. This is not true
        # for an input that the first layer changes in place.
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
        """Let later tasks make a graph, if the recomputation shows that `claim` was wrong."""
        if task.claimed != task.found:
            self._all_do[task.needs] = False


class _Asks(TorchFunctionMode):
    """Record whether layers read `requires_grad`, `grad` or a similar attribute of a tensor.

    Without a graph, these attributes have other values. If layers read the gradient of a parameter
    (a tensor whose id is in `ids`), `RuntimeError` is raised.
    """

    only_watches = True
    asked = False
    properties = (
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
        Tensor.grad_fn.__get__,  # type: ignore[union-attr]
        Tensor.grad.__get__,  # type: ignore[union-attr]
    )
    # Compare names: torch.compile traces this method, and cannot look up a function in a set.
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
