"""Find out which outputs of a task require grad, if its first pass runs without a graph.

What goes wrong without this guard: a layer also returns an integer tensor, or it detaches one of
its two outputs. If the pipeline assumed that all outputs require grad, the next task would compute
gradients that the layers do not compute without a pipeline. Or autograd would wait for gradients
that never come.

Tasks are of the same kind if the same inputs require grad. For each kind, the guard works like
this:

1. The first task makes a graph in its first pass. The graph shows which outputs require grad, and
   is then freed.
2. If all floating-point outputs of the first task require grad, later first passes run without a
   graph. The guard then assumes that all their floating-point outputs require grad, too. (There is
   an exception: if a layer reads an attribute such as `requires_grad`, later tasks make a graph.)
3. Otherwise, each later task makes a graph in its first pass.
4. If a recomputation shows that the assumption was wrong, all later tasks make a graph.

If layers are compiled, there are three exceptions from step 2, because `torch.compile` compiles
each layer once more for first passes without a graph:

- If only some of a stage's layers are compiled, all tasks make a graph. The guard would have to
  watch what the other layers read, and `torch.compile` would compile layers once more for this.
- Only tasks for which `torch.compile` needs the same code as for the stage's first task run without
  a graph. So other sizes, modes or frozen parameters cause no further compilations.
- If layers draw random numbers, all tasks make a graph. Otherwise, a first pass could draw another
  dropout mask than the recomputation. For example, if attention is written as a formula, Inductor
  (the default compiler) replaces it by a fused kernel with a mask of its own, but only in code that
  makes a graph.

What it costs: a first pass that makes a graph uses more time and memory. The first task of each
kind has such a first pass, and so have the tasks of steps 3 and 4, and of the three exceptions. All
other first passes only look up a value in a dictionary, and compare sizes if layers are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class FirstTask:
    """What the first task of its kind has shown.

    Attributes:
        allows_no_graph: Whether later first passes may run without a graph, as far as this task has
            shown.
        compiled_for: What the layers are compiled for: modes, and the sizes and dtypes of inputs.
            It is empty if the layers are not compiled.
    """

    allows_no_graph: bool
    compiled_for: tuple[object, ...] = ()


class OutputGradients(Guard):
    """The guard that finds out which outputs of a stage's tasks require grad.

    The next stage has to know this, so that it computes gradients for exactly these outputs. But a
    first pass (the forward of a checkpointed task) can run without an autograd graph, and then does
    not show which outputs require grad.

    Args:
        first_tasks: What the first task of each kind has shown. A key says for each input of a
            task whether the input requires grad. If layers are compiled, there is only one first
            task, with the key `()`.
        ids: The ids of parameters, and of stand-ins (detached parameters that tasks use).
        begins_in_place: Whether the first layer changes its input in place.
        modes: If any layer is compiled: the training modes of the layers, the `requires_grad` of
            the parameters, and whether autocast is on. Otherwise, `None`.
        all_compiled: Whether all layers are compiled.
    """

    def __init__(
        self,
        first_tasks: dict[Needs, FirstTask],
        ids: set[int],
        begins_in_place: bool,
        *,
        modes: tuple[bool, ...] | None,
        all_compiled: bool,
    ) -> None:
        self._first_tasks = first_tasks
        self._ids = ids
        self._begins_in_place = begins_in_place
        self._modes = modes
        self._compiled = modes is not None
        self._all_compiled = all_compiled

    def before_first_pass(self, task: GuardedTask) -> Context | None:
        """Decide whether the task makes a graph in its forward.

        For the first task of its kind, return a context that records whether layers read gradients
        or `requires_grad`, which would differ without a graph. (Tasks are of the same kind if the
        same inputs require grad.)
        """
        first = self._first_tasks.get(() if self._compiled else task.needs)
        if first is None or not first.allows_no_graph:
            task.with_graph = True
        elif self._compiled:
            task.with_graph = self._compiled_for(task) != first.compiled_for
        else:
            task.with_graph = False
        if not task.with_graph:
            return None
        contexts: list[Context] = []
        if packs_saved_tensors(True):
            # The graph of this first pass is freed unused. So saved-tensor hooks around the
            # pipeline, such as those of torch.utils.checkpoint, must not see what it saves.
            contexts.append(saved_tensors_hooks(Tensor.detach, lambda x: x))
        if first is None and not self._compiled:
            task.noted[self] = _Asks(self._ids)
            contexts.append(task.noted[self])
        return Nested(contexts) if contexts else None

    def claim(self, task: GuardedTask, given: Flat, outputs: Flat) -> list[bool]:
        """Return for each output of a task's first pass whether it requires grad.

        If the layers have made a graph, the graph shows which outputs require grad. Otherwise, this
        method assumes that each floating-point output requires grad.

        Args:
            task: The task.
            given: The inputs of the layers.
            outputs: The outputs of the layers.

        Raises:
            RuntimeError: If compiled layers have drawn random numbers in a first pass without a
                graph.
        """
        # An output that is the same tensor as an input requires grad if that input does. This is
        # not so for an input that the first layer changes in place.
        handed_on: dict[int, bool] = {}
        for x, need in zip(given, task.needs, strict=True):
            handed_on[id(x)] = need
        if self._begins_in_place and task.form is Tensor:
            handed_on.pop(id(given[0]), None)
        able = []
        for y in outputs:
            can_take = y is not None and (y.is_floating_point() or y.is_complex())
            able.append(handed_on.get(id(y), can_take))
        watched = task.noted.pop(self, None)
        if self._compiled and task.drew:
            self._make_graphs(task)
            if not task.with_graph:
                raise RuntimeError(_DRAWS_LATER)
        if not task.with_graph:
            return able
        if self._compiled:
            allows = self._all_compiled and task.graph_needs == able
            self._first_tasks.setdefault((), FirstTask(allows, self._compiled_for(task)))
        elif watched is not None:
            allows = task.graph_needs == able and not watched.asked
            self._first_tasks[task.needs] = FirstTask(allows)
        return task.graph_needs

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Let later first passes make a graph if `claim` was wrong about this task's outputs.

        In the first pass, the method `claim` has assumed which outputs require grad. The
        recomputation shows which outputs really do.
        """
        if task.claimed_needs != task.graph_needs:
            self._make_graphs(task)

    def _make_graphs(self, task: GuardedTask) -> None:
        """Let later first passes of the task's kind make a graph."""
        key = () if self._compiled else task.needs
        self._first_tasks[key] = FirstTask(allows_no_graph=False)

    def _compiled_for(self, task: GuardedTask) -> tuple[object, ...]:
        inputs = [None if x is None else (x.shape, x.dtype) for x in task.inputs or ()]
        return (self._modes, task.needs, inputs)


class _Asks(TorchFunctionMode):
    """Record in `asked` whether layers read `requires_grad`, `grad` or a similar attribute.

    In a first pass without a graph, these attributes have other values than in the recomputation.

    Args:
        ids: The ids of parameters. Reading the `grad` of one of them raises `RuntimeError`.
    """

    only_watches = True
    asked = False
    _properties: Any = (Tensor.requires_grad, Tensor.is_leaf, Tensor.grad_fn, Tensor.grad)
    properties = tuple([each.__get__ for each in _properties])
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


_DRAWS_LATER = (
    "the compiled layers of this stage drew random numbers, but drew none when they first ran "
    "(perhaps their dropout was 0 then), and a recomputation could draw other ones; run this "
    "mini-batch again, which each stage asks for at most once"
)

_READ_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
