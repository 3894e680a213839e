"""The graph of one task: which outputs take a gradient, and what it holds until it has gone backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe.task.ambient import Ambient
from torchgpipe.task.contents import Contents
from torchgpipe.task.randomness import Randomness
from torchgpipe.task.stage import Stage
from torchgpipe.task.task_graph import TaskGraph
from torchgpipe.tensors.microbatch import Flat

from ..layers import Lambda

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])


class Task:
    """A task on `layers`."""

    def __init__(self, *layers: nn.Module, checkpoint: bool) -> None:
        stage = Stage(0, nn.Sequential(*layers), CPU)
        stage.look()
        stage.connect([])
        self.contents: Contents = stage.contents(recomputed=checkpoint)
        self.graph = TaskGraph(stage, self.contents, Ambient([CPU]), Randomness(), 0, None, checkpoint=checkpoint)

    def forward(self, *inputs: Tensor, needs: tuple[bool, ...] = (True, True)) -> Flat:
        """Run it on a tensor, or on several as a tuple; `needs` says which of them take a gradient."""
        given = tuple(x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=False))
        outputs, self.atomic = self.graph.forward(given, len(inputs) == 1, ())
        self.needs = tuple(y is not None and y.requires_grad for y in outputs)
        return tuple(None if y is None else y.detach() for y in outputs)

    def backward(self, *grads: Tensor | None, keep: bool = False) -> Flat:
        return self.graph.backward(grads, keep=keep)


@pytest.mark.parametrize("keep, outlives", [(False, (True, False)), (True, (True, True))], ids=["once", "kept"])
def test_of_several_inputs_those_that_are_saved_outlive_a_recomputation(
    keep: bool, outlives: tuple[bool, bool]
) -> None:
    saved, not_saved = torch.randn(2, 3), torch.randn(2, 3)
    storages = [StorageWeakRef(x.untyped_storage()) for x in (saved, not_saved)]
    task = Task(Lambda(lambda pair: pair[0].square() + pair[1]), checkpoint=True)
    outputs = task.forward(saved, not_saved)
    del saved, not_saved
    assert not any(storage.expired() for storage in storages)
    task.graph.recompute(keep=keep)
    assert tuple(not storage.expired() for storage in storages) == outlives
    for _ in range(2 if keep else 1):
        assert all(grad is not None for grad in task.backward(*outputs, keep=keep))


# A layer with two inputs, of which only the first takes a gradient. Then: which of its outputs take one, without and
# with checkpointing. A checkpointed first pass builds no graph, so each new floating-point output is assumed to take
# one.
NEEDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[bool, ...], tuple[bool, ...]]] = {
    "both": (lambda a, b: (a * 2, a * b), (True, True), (True, True)),
    "an input": (lambda a, b: (a, b), (True, False), (True, False)),
    "integers": (lambda a, b: (a.argmax(1), a.exp()), (False, True), (False, True)),
    "detached": (lambda a, b: (a.exp(), a.exp().detach()), (True, False), (True, True)),
    "constants": (lambda a, b: (a.exp(), torch.ones(2)), (True, False), (True, True)),
}


@BOTH
@pytest.mark.parametrize("function, plain, assumed", NEEDS.values(), ids=NEEDS)
def test_which_outputs_take_a_gradient(
    function: Callable[..., Any], plain: tuple[bool, ...], assumed: tuple[bool, ...], checkpoint: bool
) -> None:
    task = Task(Lambda(lambda pair: function(*pair)), checkpoint=checkpoint)
    outputs = task.forward(torch.randn(2, 3), torch.randn(2, 3), needs=(True, False))
    assert (task.atomic, task.needs) == (False, assumed if checkpoint else plain)
    # Gradients for all that were promised one, also where it turns out that they take none.
    grads = task.backward(*(y if need else None for y, need in zip(outputs, task.needs, strict=True)))
    assert [grad is not None for grad in grads] == [True, False]


@BOTH
@pytest.mark.parametrize("comes", [True, False], ids=["a gradient", "none"])
def test_nothing_is_held_after_the_last_backward(comes: bool, checkpoint: bool) -> None:
    made: list[StorageWeakRef] = []

    def note(x: Tensor) -> Tensor:
        y = x.exp()
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    task = Task(Lambda(note), nn.Tanh(), checkpoint=checkpoint)
    x = torch.randn(2, 3)
    storage = StorageWeakRef(x.untyped_storage())
    outputs = task.forward(x)
    del x
    # exp needs its output and tanh its own: a checkpointed task holds its input instead.
    assert (made[0].expired(), storage.expired()) == ((True, False) if checkpoint else (False, True))
    result = task.backward(*outputs if comes else [None])
    del outputs
    assert all(ref.expired() for ref in made) and storage.expired()
    assert len(result) == 1
