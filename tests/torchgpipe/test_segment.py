"""A segment: one task's piece of the graph, with a backward of its own and perhaps a recomputation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.randomness import UNSEEDED, Randomness, SavedState
from torchgpipe.segment import Segment, detached
from torchgpipe.skip.layout import PartitionSkips
from torchgpipe.stage import Stage

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])


def segment(*layers: nn.Module, checkpoint: bool, randomness: Randomness = UNSEEDED) -> Segment:
    stage = Stage(0, nn.Sequential(*layers), CPU, PartitionSkips((), ()))
    return Segment(stage, checkpoint=checkpoint, ambient=Ambient([CPU]), randomness=randomness)


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


@BOTH
def test_the_gradients_of_a_plain_backward(checkpoint: bool) -> None:
    linear, x, grad = nn.Linear(3, 4), torch.randn(2, 3), torch.randn(2, 4)
    task = segment(linear, nn.Tanh(), checkpoint=checkpoint)
    (y,), atomic, needs = task.forward((x,), True, (True,))
    assert (atomic, needs, y.requires_grad) == (True, (True,), False)  # type: ignore[union-attr]
    (input_grad,) = task.backward((grad,))

    twin = x.clone().requires_grad_()
    parameter_grads = [p.grad for p in linear.parameters()]
    linear.zero_grad()
    expected = linear(twin).tanh()
    expected.backward(grad)
    assert torch.equal(y, expected)  # type: ignore[arg-type]
    assert torch.equal(input_grad, twin.grad)  # type: ignore[arg-type]
    assert all(map(torch.equal, parameter_grads, (p.grad for p in linear.parameters())))  # type: ignore[arg-type]


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
    task = segment(linear, passes, checkpoint=checkpoint)
    outputs, _, takes_grad = task.forward((torch.randn(2, 3),), True, (needs,))
    assert takes_grad == (needs or not frozen,)
    if takes_grad[0]:
        task.backward(detached(outputs))
    assert passes.seen == expected


def test_a_recomputation_on_its_own_and_only_once() -> None:
    passes = Passes()
    task = segment(nn.Linear(3, 3), passes, checkpoint=True)
    outputs, _, _ = task.forward((torch.randn(2, 3),), True, (True,))
    assert passes.seen == ["first, no grad"]
    task.recompute()
    task.recompute()
    assert passes.seen == ["first, no grad", "second, grad"]
    task.backward(detached(outputs))
    task.recompute()
    assert len(passes.seen) == 2


@pytest.mark.parametrize(
    ("keep", "outlives"), [(False, (True, False)), (True, (True, True))], ids=["once", "kept for another"]
)
def test_of_several_inputs_those_that_are_saved_outlive_a_recomputation(
    keep: bool, outlives: tuple[bool, bool]
) -> None:
    saved, not_saved = torch.randn(2, 3), torch.randn(2, 3)
    storages = [StorageWeakRef(x.untyped_storage()) for x in (saved, not_saved)]
    task = segment(Lambda(lambda a, b: a.square() + b), checkpoint=True)
    outputs, _, _ = task.forward((saved, not_saved), False, (True, True))
    del saved, not_saved
    assert not any(storage.expired() for storage in storages)
    task.recompute(keep=keep)
    assert tuple(not storage.expired() for storage in storages) == outlives
    for _ in range(2 if keep else 1):
        assert all(grad is not None for grad in task.backward(detached(outputs), keep=keep))


def test_a_task_without_checkpointing_recomputes_nothing() -> None:
    passes = Passes()
    task = segment(nn.Linear(3, 3), passes, checkpoint=False)
    task.forward((torch.randn(2, 3),), True, (True,))
    task.recompute()
    assert passes.seen == ["only, grad"]


# Outputs of a function of two inputs, of which the first takes a gradient: which outputs do, in a task that is not
# checkpointed and in one that is. The first pass of a checkpointed one has no graph, so it has to assume.
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
    task = segment(Lambda(function), checkpoint=checkpoint)
    outputs, atomic, needs = task.forward(inputs, False, (True, False))
    assert (atomic, needs) == (False, assumed if checkpoint else plain)
    # Gradients for all that were promised one, also where it turns out that they take none.
    grads = tuple(torch.ones_like(y) if n and y is not None else None for y, n in zip(outputs, needs, strict=True))
    one, other = task.backward(grads)
    assert other is None
    twin = inputs[0].clone().requires_grad_()
    sum(y.sum() for y in function(twin, inputs[1]) if y.requires_grad).backward()
    assert torch.equal(one, twin.grad)  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_that_do_not_come(given: tuple[bool, bool], checkpoint: bool) -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)

    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = one, other

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    task = segment(Fan(), checkpoint=checkpoint)
    outputs, _, _ = task.forward((torch.randn(2, 3),), True, (True,))
    (grad,) = task.backward(tuple(y if g else None for y, g in zip(detached(outputs), given, strict=True)))
    assert (one.weight.grad is not None, other.weight.grad is not None) == given
    assert (grad is not None) == any(given)


@BOTH
def test_inputs_that_take_no_gradient_get_none(checkpoint: bool) -> None:
    task = segment(Lambda(lambda a, b, k: a * b * k), nn.Linear(3, 3), checkpoint=checkpoint)
    inputs = torch.randn(2, 3), torch.randn(2, 3), torch.arange(6).reshape(2, 3)
    outputs, _, _ = task.forward(inputs, False, (False, True, False))
    one, other, integer = task.backward(detached(outputs))
    assert one is None and integer is None
    assert other is not None and other.shape == (2, 3)


@BOTH
def test_without_inputs_that_take_a_gradient(checkpoint: bool) -> None:
    linear = nn.Linear(3, 3)
    task = segment(linear, checkpoint=checkpoint)
    outputs, _, needs = task.forward((torch.randn(2, 3),), True, (False,))
    assert needs == (True,)
    assert task.backward(detached(outputs)) == (None,)
    assert linear.weight.grad is not None


@BOTH
def test_kept_for_another_backward(checkpoint: bool) -> None:
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    task = segment(linear, nn.Tanh(), checkpoint=checkpoint)
    outputs, _, _ = task.forward((x,), True, (True,))
    results = []
    for keep in (True, True, False):
        linear.zero_grad()
        (grad,) = task.backward(detached(outputs), keep=keep)
        results.append((grad, linear.weight.grad))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="pass retain_graph=True to the first backward"):
        task.backward(detached(outputs))


@BOTH
def test_nothing_is_held_after_the_last_backward(checkpoint: bool) -> None:
    made: list[StorageWeakRef] = []

    def note(x: Tensor) -> Tensor:
        y = x.exp()
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    task = segment(Lambda(note), nn.Tanh(), checkpoint=checkpoint)
    x = torch.randn(2, 3)
    storage = StorageWeakRef(x.untyped_storage())
    outputs, _, _ = task.forward((x,), True, (True,))
    del x
    # exp needs its output and tanh its own: a checkpointed segment holds its input instead.
    assert (made[0].expired(), storage.expired()) == ((True, False) if checkpoint else (False, True))
    grads = detached(outputs)
    del outputs
    result = task.backward(grads)
    assert all(ref.expired() for ref in made) and storage.expired()
    assert len(result) == 1


@pytest.mark.parametrize(
    "layer", [nn.ReLU(inplace=True), Lambda(lambda x: x.add_(1)), Lambda(lambda x: x[:1].zero_() + 1)]
)
def test_an_input_changed_in_place(layer: nn.Module) -> None:
    task = segment(layer, nn.Linear(3, 3), checkpoint=True)
    with pytest.raises(RuntimeError, match=r"partition 0 changed its input in place.*inplace=False.*'never'"):
        task.forward((torch.randn(2, 3),), True, (True,))


def test_an_activation_changed_in_place() -> None:
    task = segment(nn.Linear(3, 3), nn.ReLU(inplace=True), checkpoint=True)
    outputs, _, _ = task.forward((torch.randn(2, 3),), True, (True,))
    assert task.backward(detached(outputs))[0] is not None


def test_both_passes_draw_the_same() -> None:
    drawn: list[Tensor] = []

    def draw(x: Tensor) -> Tensor:
        drawn.append(torch.rand_like(x))
        return x * drawn[-1]

    task = segment(Lambda(draw), checkpoint=True, randomness=SavedState(None))
    outputs, _, _ = task.forward((torch.randn(2, 3),), True, (True,))
    torch.rand(5)
    task.backward(detached(outputs))
    assert torch.equal(*drawn)


def test_running_statistics_are_updated_in_the_first_pass_only() -> None:
    norm = nn.BatchNorm1d(3)
    task = segment(nn.Linear(3, 3), norm, checkpoint=True)
    outputs, _, _ = task.forward((torch.randn(4, 3),), True, (True,))
    after = {name: b.clone() for name, b in norm.named_buffers()}
    assert after["num_batches_tracked"] == 1
    task.backward(detached(outputs))
    assert all(torch.equal(b, after[name]) for name, b in norm.named_buffers())


@BOTH
def test_an_exception_in_backward_leaves_the_segment_usable(checkpoint: bool) -> None:
    fail = True

    def hook(grad: Tensor) -> None:
        if fail:
            raise ArithmeticError("once")

    def hooked(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(hook)
        return y

    task = segment(Lambda(hooked), checkpoint=checkpoint)
    outputs, _, _ = task.forward((torch.randn(2, 3),), True, (True,))
    with pytest.raises(ArithmeticError, match="once"):
        task.backward(detached(outputs), keep=True)
    fail = False
    (grad,) = task.backward((torch.ones(2, 3),))
    assert torch.equal(grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]


@BOTH
def test_segments_go_backward_in_threads_at_once(checkpoint: bool) -> None:
    # Each waits, in its backward, until the other has begun its own.
    barrier = threading.Barrier(2, timeout=120)

    def wait(grad: Tensor) -> None:
        barrier.wait()

    def meet(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(wait)
        return y

    tasks = [segment(Lambda(meet), checkpoint=checkpoint) for _ in range(2)]
    outputs = [task.forward((torch.randn(2, 3),), True, (True,))[0] for task in tasks]
    grads: list[Any] = []
    threads = [
        threading.Thread(target=lambda t=t, y=y: grads.append(t.backward(detached(y))))  # type: ignore[misc]
        for t, y in zip(tasks, outputs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(grads) == 2


def test_detached() -> None:
    x = torch.randn(2, requires_grad=True)
    y, nothing = detached((x * 2, None))
    assert nothing is None
    assert y is not None and not y.requires_grad and torch.equal(y, x * 2)
