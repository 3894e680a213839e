"""The graph of one task: what it gives, what it holds meanwhile, and what it refuses to recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.contents import Contents
from torchgpipe.microbatch import Flat
from torchgpipe.randomness import Randomness
from torchgpipe.stage import Stage
from torchgpipe.task_graph import TaskGraph

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])


class Task:
    """A task on `layers`; `leaves` are those of its parameters."""

    def __init__(self, *layers: nn.Module, checkpoint: bool) -> None:
        stage = Stage(0, nn.Sequential(*layers), CPU)
        stage.look()
        stage.connect([])
        self.contents: Contents = stage.contents(recomputed=checkpoint)
        self.graph = TaskGraph(stage, self.contents, Ambient([CPU]), Randomness(), 0, None, checkpoint=checkpoint)

    def forward(self, *inputs: Tensor, needs: Any = True, shared: Any = ()) -> Flat:
        """Run it on a tensor, or on several as a tuple; `needs` says which of them take a gradient."""
        needs = needs if isinstance(needs, tuple) else (needs,) * len(inputs)
        given = tuple(x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True))
        outputs, self.atomic = self.graph.forward(given, len(inputs) == 1, shared)
        self.needs = tuple(y is not None and y.requires_grad for y in outputs)
        return tuple(None if y is None else y.detach() for y in outputs)

    def backward(self, *grads: Tensor | None, keep: bool = False) -> Flat:
        return self.graph.backward(grads, keep=keep)


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value) if isinstance(value, Tensor) else self.function(*value)


class Passes(nn.Module):
    """Record in which passes the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        grad = "grad" if torch.is_grad_enabled() else "no grad"
        which = "first" if is_checkpointing() else "second" if is_recomputing() else "only"
        self.seen.append(f"{which}, {grad}")
        return x


@pytest.mark.parametrize(
    "checkpoint, needs, frozen, expected",
    [
        (False, True, False, ["only, grad"]),
        (True, True, False, ["first, no grad", "second, grad"]),
        (True, False, False, ["first, no grad", "second, grad"]),
        (True, True, True, ["first, no grad", "second, grad"]),
        # Nothing would go backward, so nothing is kept.
        (True, False, True, ["only, grad"]),
    ],
)
def test_passes(checkpoint: bool, needs: bool, frozen: bool, expected: list[str]) -> None:
    passes, linear = Passes(), nn.Linear(3, 3).requires_grad_(not frozen)
    task = Task(linear, passes, checkpoint=checkpoint)
    outputs = task.forward(torch.randn(2, 3), needs=needs)
    assert task.needs == (needs or not frozen,)
    assert passes.seen == expected[:1]
    # A recomputation of its own, and only one.
    task.graph.recompute()
    task.graph.recompute()
    assert passes.seen == expected
    task.backward(*outputs)
    task.graph.recompute()
    assert passes.seen == expected


@pytest.mark.parametrize(
    ("keep", "outlives"), [(False, (True, False)), (True, (True, True))], ids=["once", "kept for another"]
)
def test_of_several_inputs_those_that_are_saved_outlive_a_recomputation(
    keep: bool, outlives: tuple[bool, bool]
) -> None:
    saved, not_saved = torch.randn(2, 3), torch.randn(2, 3)
    storages = [StorageWeakRef(x.untyped_storage()) for x in (saved, not_saved)]
    task = Task(Lambda(lambda a, b: a.square() + b), checkpoint=True)
    outputs = task.forward(saved, not_saved)
    del saved, not_saved
    assert not any(storage.expired() for storage in storages)
    task.graph.recompute(keep=keep)
    assert tuple(not storage.expired() for storage in storages) == outlives
    for _ in range(2 if keep else 1):
        assert all(grad is not None for grad in task.backward(*outputs, keep=keep))


# A layer with two inputs, of which only the first takes a gradient. Then: which of its outputs take one, without and
# with checkpointing. A checkpointed first pass has no graph, so every new floating-point output counts as taking one.
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
    inputs = torch.randn(2, 3), torch.randn(2, 3)
    task = Task(Lambda(function), checkpoint=checkpoint)
    outputs = task.forward(*inputs, needs=(True, False))
    assert (task.atomic, task.needs) == (False, assumed if checkpoint else plain)
    # Gradients for all that were promised one, also where it turns out that they take none.
    one, other = task.backward(*(torch.ones_like(y) if n else None for y, n in zip(outputs, task.needs, strict=True)))  # type: ignore[arg-type]
    assert other is None
    twin = inputs[0].clone().requires_grad_()
    sum(y.sum() for y in function(twin, inputs[1]) if y.requires_grad).backward()
    assert torch.equal(one, twin.grad)  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize("needs", [(False, True, False), (True, False, False), (False, False, False)], ids=str)
def test_inputs_that_take_no_gradient_get_none(needs: tuple[bool, ...], checkpoint: bool) -> None:
    task = Task(Lambda(lambda a, b, k: a * b * k), nn.Linear(3, 3), checkpoint=checkpoint)
    outputs = task.forward(torch.randn(2, 3), torch.randn(2, 3), torch.arange(6).reshape(2, 3), needs=needs)
    assert task.needs == (True,)
    assert tuple(grad is not None for grad in task.backward(*outputs)) == needs
    assert None not in task.contents.leaves.take()


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


# The first layer, and whether a checkpointed task refuses it: one that says that it works in place gets a copy.
IN_PLACE: dict[str, tuple[nn.Module, bool]] = {
    "relu": (nn.ReLU(inplace=True), False),
    "relu, nested": (nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(inplace=True))), False),
    "add": (Lambda(lambda x: x.add_(1)), True),
    "a part": (Lambda(lambda x: x[:1].zero_() + 1), True),
    "later": (nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), False),
}


@pytest.mark.parametrize("layer, refused", IN_PLACE.values(), ids=IN_PLACE)
def test_an_input_changed_in_place(layer: nn.Module, refused: bool) -> None:
    x = torch.randn(2, 3)
    before = x.clone()
    task = Task(layer, nn.Linear(3, 3), checkpoint=True)
    if refused:
        with pytest.raises(RuntimeError, match=r"partition 0 changed its input in place.*inplace=False.*'never'"):
            task.forward(x)
        return
    outputs = task.forward(x)
    assert torch.equal(x, before)
    assert task.backward(*outputs)[0] is not None
    assert torch.equal(x, before)


def test_a_copy_of_an_input_may_take_a_gradient_where_the_input_takes_none() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(self.weight)

    task = Task(nn.ReLU(inplace=True), Scale(), checkpoint=True)
    outputs = task.forward(torch.ones(2, 3), needs=False)
    assert task.needs == (True,)
    assert task.backward(*outputs) == (None,)
    assert task.contents.leaves.take()[0].tolist() == [2, 2, 2]  # type: ignore[union-attr]


def test_shared_memory_is_not_copied_for_a_layer_in_place() -> None:
    task = Task(nn.ReLU(inplace=True), checkpoint=True)
    with pytest.raises(RuntimeError, match="shares memory with another tensor"):
        task.forward(torch.randn(2, 3), shared=(True,))
