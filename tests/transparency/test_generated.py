"""Generated models as pipelines: all that a user can see is that of the plain layers, or the call is refused.

    MODELS=2000 SEED=1 python -m pytest tests/transparency/test_generated.py -s

runs other models than the suite does, and prints how many, and what was refused.
"""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import hypothesis
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe import GPipe

from .conftest import Outcome, Plain, compare, tensors, total
from .layers import Draw, leaves
from .models import Case, Step, cases

MODELS = int(os.environ.get("MODELS", 300))
SEED = os.environ.get("SEED")

# float64 has 53 bits, and no model multiplies by more than some thousand.
REORDERED = {"rtol": 1e-9, "atol": 1e-9}

# What a call may refuse: the message, and whether a case gives a reason for it.
REFUSED: dict[str, Callable[[Case], bool]] = {
    "modified by an inplace operation|modified inplace|in an in-place operation|written-to": lambda case: case.in_place,
    "changed an input in place that shares memory": lambda case: case.in_place,
    "partition . changed its input in place": lambda case: case.in_place,
    "an input of partition . was changed in place after its forward": lambda case: case.in_place,
    "parameter .* was changed in place": lambda case: (
        not {"decaying parameter in place", "embedding, changed in forward"}.isdisjoint(case.kinds)
        or ("constant" in case.kinds and case.in_place)
    ),
    "draws random numbers within torch.utils.checkpoint": lambda case: (
        "dropout, checkpointed" in case.kinds and case.engine == "workers"
    ),
    "Inference tensor": lambda case: "inference" in {step.run for step in case.steps},
}


class Untouched(Plain):
    """What plain layers compute where PyTorch would refuse to go backward: tensors are saved as they were.

    A pipeline copies some of them, and may then work where plain layers do not.
    """

    def forward(self, value: Any) -> Any:
        # Not clones, which could have other strides, and so another order of summation.
        with saved_tensors_hooks(lambda x: copy.deepcopy(x.detach()), lambda x: x):
            parts = self.split(value)
            # One is not concatenated, which would give its gradient another layout, and sums of it another order.
            outputs = super().forward(value) if len(parts) > 1 else self.layers(parts[0])
        for layer in self.modules():
            if isinstance(layer, Undivided):
                layer.commit()
        return outputs

    def split(self, value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            # Views of a leaf could not be changed in place.
            return [part.clone() for part in super().split(value)]
        parts = {id(x): self.split(x) for x in value}
        return list(zip(*(parts[id(x)] for x in value), strict=True))


class Undivided(nn.BatchNorm1d):
    """Batch norm that keeps the running statistics of the mini-batch."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        vars(self).setdefault("met", []).append(x.detach().clone())
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def commit(self) -> None:
        if met := vars(self).pop("met", None):
            super().forward(torch.cat(met))


class Refused(Exception):
    """The pipeline raised its cause."""


def forward(model: nn.Module, case: Case, step: Step, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the leaves that a step's inputs are made of, which depend on the seed alone, and its outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inputs = [case.leaf() for _ in range(2 if step.run == "two forwards" else 1)]
    model.train(step.training)
    call: Callable[[Any], Any] = model
    if step.run == "functional_call":
        weights = {name: 2 * p for name, p in model.named_parameters()}
        call = lambda x: torch.func.functional_call(model, weights, (x,))  # noqa: E731
    with {"no grad": torch.no_grad, "inference": torch.inference_mode}.get(step.run, nullcontext)():
        outputs = [y.clone() for x in inputs for y in tensors(call(case.value(x)))]
    return inputs, outputs


def backward(model: nn.Module, step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Tensor | None]:
    """Return all gradients after the backward of a step."""
    everything = {f"input {k}": x for k, x in enumerate(inputs)} | leaves(layers(model))
    found: dict[str, Tensor | None] = {}
    if any(y.requires_grad for y in outputs) and step.run != "no backward":
        loss = total(tuple(outputs))
        if step.run == "autograd.grad":
            wanted = {name: x for name, x in everything.items() if x.requires_grad}
            grads = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True) if wanted else ()
            found = {f"{name} by grad": grad for name, grad in zip(wanted, grads, strict=True)}
        else:
            model.train(step.training and step.run != "evaluation between")
            if step.run == "backward twice" and outputs[0].requires_grad:
                total(outputs[0]).backward(retain_graph=True)
            some = [x for x in everything.values() if x.requires_grad][::2]
            loss.backward(inputs=some if step.run == "inputs" and some else None)
    return found | {name: x.grad for name, x in everything.items()}


def finish(model: nn.Module, step: Step) -> None:
    """Change parameters as an optimizer would, or otherwise."""
    parameters = [*leaves(model).values()]
    for p in parameters if "update" in step.after else ():
        if p.grad is not None:
            p.data.sub_(p.grad.to_dense().sign(), alpha=0.1)
    for p in parameters if step.after != "accumulate" else ():
        if step.after != "update, zero":
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()
    if step.after == "freeze" and parameters:
        parameters[0].requires_grad_(not parameters[0].requires_grad)
    if step.after == "reload":
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def layers(model: nn.Module) -> nn.Module:
    return model.layers if isinstance(model, Plain) else model


def draws(model: nn.Module) -> list[Draw]:
    return [layer for layer in model.modules() if isinstance(layer, Draw)]


def assert_equals_plain(case: Case) -> None:
    """Run the steps of a case as a pipeline and plainly, and compare; raise `Refused` where the pipeline raises."""
    module, plain = case.build(), Untouched(case.build(), case.chunks)
    if case.deferred_batch_norm:
        for layer in plain.modules():
            if type(layer) is nn.BatchNorm1d:
                layer.__class__ = Undivided
    with refusing():
        piped = GPipe(module, case.balance, devices=["cpu"] * len(case.balance), **case.options())
    piped.observer = (lambda task: nullcontext()) if case.observed else None

    for k, step in enumerate(case.steps):
        with refusing():
            inputs, outputs = forward(piped, case, step, k)
        for layer, twin in zip(draws(piped), draws(plain), strict=True):
            twin.recorded = iter(layer.first)
        try:
            plain_inputs, plain_outputs = forward(plain, case, step, k)
        except RuntimeError:
            with refusing():  # at the latest
                backward(piped, step, inputs, outputs)
            raise
        ours, theirs = outcome(outputs), outcome(plain_outputs)
        with refusing():
            needed = [y if p.requires_grad else y.detach() for y, p in zip(outputs, plain_outputs, strict=True)]
            ours.gradients = backward(piped, step, inputs, needed)
        theirs.gradients = backward(plain, step, plain_inputs, plain_outputs)
        ours.buffers, theirs.buffers = (
            dict(m.named_buffers()) | {n: p.detach() for n, p in leaves(m).items()} for m in (piped, plain.layers)
        )
        compare(ours, theirs, REORDERED if case.reorders else None)

        for layer in draws(piped):
            assert all(any(map(mask.equal, layer.first)) for mask in layer.second), "a recomputation drew anew"
            layer.first, layer.second = [], []
        for model in (piped, plain.layers):
            finish(model, step)
        # A gradient that is zero but for rounding has any sign.
        for p, q in zip(leaves(piped).values(), leaves(plain.layers).values(), strict=True):
            q.data.copy_(p.data)


def outcome(outputs: list[Tensor]) -> Outcome:
    named = {f"output {k}": y for k, y in enumerate(outputs)}
    return Outcome({n: y.detach() for n, y in named.items()}, {}, {}, {n: y.requires_grad for n, y in named.items()})


@contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Refused from error


def runs_plainly(case: Case) -> bool:
    """Whether PyTorch lets plain layers do what a pipeline refuses."""
    plain = Plain(case.build(), case.chunks)
    try:
        for k, step in enumerate(case.steps):
            backward(plain, step, *forward(plain, case, step, k))
            finish(plain.layers, step)
    except RuntimeError:
        return False
    return True


def verdict(case: Case) -> str:
    """Check a case; return "equal", or what was refused."""
    try:
        assert_equals_plain(case)
    except Refused as refused:
        error = refused.__cause__
        assert error is not None
        for message, expected in REFUSED.items():
            if isinstance(error, RuntimeError) and re.search(message, str(error)) and expected(case):
                return f"refused{'' if runs_plainly(case) else ' as by PyTorch'}: {message}"
        raise error from None
    return "equal"


def test_generated() -> None:
    found: Counter[str] = Counter()

    @hypothesis.settings(max_examples=MODELS, derandomize=SEED is None, database=None)
    @hypothesis.given(case=cases())
    def holds(case: Case) -> None:
        found["models"] += 1
        found[verdict(case)] += 1

    if SEED is not None:
        holds = hypothesis.seed(int(SEED))(holds)
    try:
        holds()
    finally:
        print("", *(f"{count:6} {what}" for what, count in found.most_common()), sep="\n")
    refused = sum(count for what, count in found.items() if what.startswith("refused:"))
    assert refused < 0.1 * found["models"], "a generator that is refused tests nothing"
