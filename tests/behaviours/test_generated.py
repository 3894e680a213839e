"""Test randomly generated models: a pipeline must have the results of its layers, or raise.

This command tests more models than usual, and different ones:

    MODELS=2000 SEED=1 python -m pytest tests/behaviours/test_generated.py -s

It prints how many models had equal results, and how many raised each kind of error.
"""

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..plain import Plain, piped
from ..ranks import current
from .compare import differences
from .parts.draw import assert_drawn_again, reuse_draws
from .parts.models import AROUND, INPUTS, Case, Step
from .parts.strategy import cases
from .row import tensors, total

SEED = os.environ.get("SEED")

# This is for float64 with 53 bits, and for models that multiply by some thousand at most.
REORDERED = 1e-9

BY_AUTOGRAD = (
    "modified by an inplace operation|modified inplace|in an in-place operation|written-to"
)
BEFORE_BACKWARD = "an input of partition . was changed in place after its forward"
BEFORE_THE_NEXT = "was changed in place before (the partition took it|it was sent)"
SAME_BUFFER = "two partitions have layers that change the same buffer"
PARAMETER = ("embedding, rescaled", "constant", "parameter in place", "changed between")
REFUSED: dict[str, tuple[str, ...]] = {
    BY_AUTOGRAD: ("in place", "changed between"),
    "changed an input in place, but a skip or another input shares its memory": ("in place",),
    "partition . changed its input in place": ("in place",),
    BEFORE_BACKWARD: ("in place", "constant", "changed between"),
    "parameter .* was changed in place": PARAMETER,
    BEFORE_THE_NEXT: ("in place",),
    SAME_BUFFER: ("shared norm",),
    "cannot convert .*, because it overrides train": ("batch norm, frozen",),
    "draws random numbers within torch.utils.checkpoint": ("dropout, checkpointed",),
    "Inference tensor": ("inference",),
    "reads the gradient of its parameter": ("as weights",),
    "the default dtype was": ("a type",),
}
"""Patterns of allowed errors, and for each the kinds of layers or steps that justify it."""


class Refused(Exception):
    """Raised by these tests if a pipeline raises an error, which becomes the `__cause__`."""


@contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Refused from error


class Unmodified(Plain):
    """Layers without a pipeline, for which autograd saves copies of tensors.

    So backward works even if a layer changed a saved tensor in place. Otherwise, PyTorch would
    raise an error. A pipeline copies some tensors and can also work in such a case. These layers
    then have the expected results.
    """

    def run(self, value: Any) -> Any:
        # A deep copy keeps the strides. With other strides, sums have another order.
        with saved_tensors_hooks(lambda x: copy.deepcopy(x.detach()), lambda x: x):
            parts = self.split(value)
            if len(parts) > 1:
                return super().run(value)
            return nn.Sequential.forward(self, parts[0])

    def split(self, value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            # Return a clone, because a view of a leaf cannot be changed in place.
            return [part.clone() for part in super().split(value)]
        parts = {id(x): self.split(x) for x in value}
        return list(zip(*(parts[id(x)] for x in value), strict=True))


def leaves(model: nn.Module) -> dict[str, Tensor]:
    """Return a dictionary from names to all tensors of a model that can get a gradient.

    They are the parameters, the parameters that a layer uses without registering them, and the
    buffers that require grad.
    """
    found: dict[str, Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if hasattr(module, "borrowed"):
            found[f"{name} borrows"] = module.borrowed[0].weight
    return found | {name: x for name, x in model.named_buffers() if "taking" in name}


NO_GRADIENTS = {"no grad": torch.no_grad, "inference": torch.inference_mode}


def forward(
    model: nn.Module, case: Case, step: Step, seed: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Run the forward of a step on random inputs that are drawn with `seed`.

    Returns:
        Three lists: the inputs, copies of the outputs to compare, and the outputs to run backward
        from.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inputs = [case.leaf()]
        if step.run == "two forwards":
            inputs.append(case.leaf())
    model.train(step.training)
    call: Callable[[Any], Any] = model
    if step.run == "functional_call":
        # `Everywhere` passes gradients to buffers only if they are leaves of the graph.
        replaced = dict(model.named_parameters()) if case.engine == "ranks" else leaves(model)
        weights = {name: 2 * p for name, p in replaced.items()}
        call = partial(called_with, model, weights)
    outputs: list[Tensor] = []
    with NO_GRADIENTS.get(step.run, nullcontext)():
        given = []
        for x in inputs:
            leaf = x if torch.is_grad_enabled() else x.detach()
            given.append(INPUTS[case.input](leaf))
        with AROUND[step.modes[0]]() as mode:
            results = [call(value) for value in given]
        for result in results:
            # Clone outputs, because an output can be a buffer.
            outputs += [y.clone() for y in tensors(result)]
    shown = []
    for y in outputs:
        copied = y.detach().clone()
        shown.append(copied.requires_grad_(y.requires_grad))
    if case.engine != "ranks":  # on ranks, each rank counts the calls of its own layers only
        shown.append(torch.tensor(getattr(mode, "calls", [])))
    return inputs, shown, outputs


def called_with(model: nn.Module, weights: dict[str, Tensor], value: Any) -> Any:
    return torch.func.functional_call(model, weights, (value,))


def backward(
    model: nn.Module, step: Step, inputs: list[Tensor], outputs: list[Tensor]
) -> dict[str, Tensor | None]:
    """Run the backward of a step; return the gradients of inputs, parameters and buffers."""
    if step.run == "frozen between":
        turn(model, step)
    everything: dict[str, Tensor] = {}
    for k, x in enumerate(inputs):
        everything[f"input {k}"] = x
    everything |= leaves(model)
    wanted = {name: x for name, x in everything.items() if x.requires_grad}
    found: dict[str, Tensor | None] = {}
    if any(y.requires_grad for y in outputs) and step.run != "no backward":
        loss = total(tuple(outputs))
        with AROUND[step.modes[1]]():
            if step.run == "autograd.grad" and wanted:
                grads = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
                for name, grad in zip(wanted, grads, strict=True):
                    found[f"{name} by grad"] = grad
            else:
                go_backward(model, step, loss, outputs[0], [*wanted.values()])
    for name, x in everything.items():
        found[name] = x.grad
    return found


def go_backward(
    model: nn.Module, step: Step, loss: Tensor, output: Tensor, wanted: list[Tensor]
) -> None:
    model.train(step.training and step.run != "evaluation between")
    if step.run == "changed between":
        for p in leaves(model).values():
            p.detach().mul_(0.9)
    if step.run == "backward twice" and output.requires_grad:
        total(output).backward(retain_graph=True)
    inputs = wanted[::2] if step.run == "inputs" else []
    loss.backward(inputs=inputs or None)


def turn(model: nn.Module, step: Step) -> None:
    """Flip `requires_grad` of every `step.every`-th parameter."""
    parameters = [*leaves(model).values()]
    for p in parameters[:: step.every]:
        p.requires_grad_(not p.requires_grad)


def finish(model: nn.Module, step: Step) -> None:
    """Do what `step.after` says after a backward.

    For example, update the parameters, zero the gradients, freeze parameters, or reload the state.
    """
    for p in leaves(model).values():
        if p.grad is not None and step.after.startswith("update"):
            p.data.sub_(p.grad.to_dense().sign(), alpha=0.1)
        if p.grad is not None and step.after == "update, zero":
            p.grad.zero_()
        elif step.after != "accumulate":
            p.grad = None
    if step.after == "freeze":
        turn(model, step)
    if step.after == "reload":
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def assert_equals_plain(case: Case) -> None:
    """Run a test case with and without a pipeline, and assert that all results are equal.

    Raises:
        Refused: If the pipeline raises an error.
    """
    module, twin = case.build(), case.build()
    plain = Unmodified(twin, chunks=case.chunks, deferred_batch_norm=case.deferred_batch_norm)
    with refusing():
        model = piped(module, case.balance, **case.options())
    model.observer = (lambda _: nullcontext()) if case.observed else None

    for k, step in enumerate(case.steps):
        with refusing():
            inputs, shown, outputs = forward(model, case, step, k)
        reuse_draws(model, plain)
        try:
            plain_inputs, plain_shown, plain_outputs = forward(plain, case, step, k)
        except RuntimeError:
            with refusing():  # the pipeline must raise an error now, if it has not raised one yet
                backward(model, step, inputs, outputs)
            # The layers without a pipeline have raised an error. PyTorch does so if a layer changes
            # a view of a parameter in place. A pipeline may work in this case, because its
            # partition changes a copy.
            changes = case.has("parameter in place", "embedding, rescaled")
            if changes or all(map(torch.equal, leaves(model).values(), leaves(plain).values())):
                return
            raise
        with refusing():
            gradients = backward(model, step, inputs, outputs)
        plain_gradients = backward(plain, step, plain_inputs, plain_outputs)
        ours = (shown, gradients, model, leaves(model))
        expected = (plain_shown, plain_gradients, plain, leaves(plain))
        assert differences(ours, expected, REORDERED if case.reorders else 0.0) == []

        assert_drawn_again(model)
        finish(model, step)
        finish(plain, step)
        # An update subtracts the sign of the gradient. If a gradient is zero up to a rounding
        # error, its sign can differ between the two models. So copy the pipeline's parameters to
        # the other model before the next step.
        for p, q in zip(leaves(model).values(), leaves(plain).values(), strict=True):
            q.data.copy_(p.data)


def verdict(case: Case) -> str:
    """Run a test case, and return its outcome as a text.

    The text is "equal", or it begins with "refused" if the pipeline raised an error that is allowed
    in this case. Any other error is raised.
    """
    try:
        assert_equals_plain(case)
    except Refused as refused:
        error = refused.__cause__
        assert error is not None
        for message, reasons in REFUSED.items():
            if re.search(message, str(error)) and case.has(*reasons):
                how = "refused, in place" if case.has("in place") else "refused"
                return f"{how}: {message}"
        raise error from None
    return "equal"


# The warning that is ignored below comes from PyTorch before 2.13. If a layer raises an error
# within `torch.utils.checkpoint`, a Python generator stays open, and warns when it is closed later.
MORE_RANKS = [pytest.param("ranks", n, marks=pytest.mark.slow) for n in (3, 4)]


@pytest.mark.filterwarnings(
    "ignore:.*_checkpoint_without_reentrant:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("engine, n", [("one process", None), ("ranks", 2), *MORE_RANKS])
def test_generated(engine: str, n: int | None, pytestconfig: pytest.Config) -> None:
    """Test generated models, and print how many had equal results or raised each kind of error."""
    one = n is None

    def agreed_verdict(case: Case) -> str:
        return verdict(case) if n is None else str(current().agreed(n, case, verdict))

    models = int(os.environ.get("MODELS", 400 if pytestconfig.getoption("all") else 150))
    # Do not shrink a failing case on ranks: each failure takes seconds.
    phases = [*hypothesis.Phase] if one else [hypothesis.Phase.generate]
    found: Counter[str] = Counter()

    @hypothesis.settings(
        max_examples=models if one else models // 10,
        derandomize=SEED is None,
        database=None,
        phases=phases,
    )
    @hypothesis.given(cases(n))
    def holds(case: Case) -> None:
        found["models"] += 1
        found[agreed_verdict(case)] += 1

    seeded = holds if SEED is None else hypothesis.seed(int(SEED))(holds)
    try:
        seeded()
    finally:
        print("")
        for what, count in found.most_common():
            print(f"{count:6} {what}")
    # About a quarter of the models is refused, mostly for changes in place, and by chance more.
    least = (0.5 if one else 0.3) * found["models"]
    assert found["equal"] > least, f"too few models are equal to test much: {found}"
