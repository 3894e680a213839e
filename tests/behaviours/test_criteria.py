"""Tests of criteria (loss functions) that use parameters of the model or of other modules.

In a step, each parameter must get its gradient exactly once, and must not change. Each case is run
several times, because whether threads disturb each other depends on timing.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter, Sequential, Tanh
from torch.utils.checkpoint import checkpoint as checkpointed

from torchgpipe import GPipe
from torchgpipe.schedules.named import NAMED

from .compare import REORDERED, differences

WIDTH, ROUNDS = 16, 4
Criterion = Callable[[Any, Tensor], Tensor]


class Net(Module):
    """A module that has the layers, and the loss function as a method, as in training frameworks.

    The tests replace its attribute `layers` by a pipeline.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[Module] = []
        for _ in range(4):
            layers += [Linear(WIDTH, WIDTH), Tanh()]
        self.layers: Any = Sequential(*layers)
        self.scale = Parameter(torch.ones(()))
        self.head = Linear(WIDTH, WIDTH)
        self.sparse = Embedding(4, WIDTH, sparse=True)
        self.hooked: list[str] = []
        for name, p in self.named_parameters():
            p.register_hook(partial(self._note, name))
        self.listed = [*self.layers.parameters()]

    def _note(self, name: str, _: Tensor) -> None:
        self.hooked.append(name)

    def loss(self, y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y, t)


def penalty(parameters: Any) -> Tensor:
    total: Tensor = sum(p.square().sum() for p in parameters)
    return 0.01 * total


# Criteria: functions of a net, an output and a target that return a loss.


def times_scale(net: Net, y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y * net.scale, t)


def with_penalty(net: Net, y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t) + penalty(net.layers.parameters())


def with_listed_penalty(net: Net, y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t) + penalty(net.listed)


def by_first_weight(net: Net, y: Tensor, t: Tensor) -> Tensor:
    first, *_ = net.listed
    return F.mse_loss(F.linear(y, first), t)


def as_in_a_gan(net: Net, y: Tensor, t: Tensor) -> Tensor:
    net.head.requires_grad_(True)
    loss = F.mse_loss(net.head(y), t)
    net.head.requires_grad_(False)
    return loss


def sparse(net: Net, y: Tensor, t: Tensor) -> Tensor:
    found = net.sparse(INDICES[: len(y)])
    return F.mse_loss(y + found, t)


def sparse_and_dense(net: Net, y: Tensor, t: Tensor) -> Tensor:
    if t[0, 0] > 0:
        return sparse(net, y, t)
    dense = net.sparse.weight[: len(y)]
    return F.mse_loss(y + dense, t)


def reentrant(_: Net, y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(checkpointed(F.tanh, y, use_reentrant=True), t)


def twice(net: Net, y: Tensor, t: Tensor) -> Tensor:
    """Compare the output with that for another input, and train with both."""
    return F.mse_loss(y, net.layers(t))


def consistent(net: Net, y: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        again = net.layers(t)
    return F.mse_loss(y, again)


def sometimes_nothing(_: Net, y: Tensor, t: Tensor) -> Tensor:
    if t[0, 0] > 0:
        return F.mse_loss(y, t)
    return torch.zeros(())


class Head(Module):
    """A criterion that has parameters."""

    def __init__(self, head: Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(self.head(y), t)


def method(net: Net) -> Criterion:
    return net.loss


def of_head(net: Net) -> Criterion:
    return Head(net.head)


def of_shared_head(net: Net) -> Criterion:
    return Head(Sequential(net.head, net.layers[-2]))


def of(criterion: Callable[[Net, Tensor, Tensor], Tensor]) -> Callable[[Net], Criterion]:
    return lambda net: partial(criterion, net)


INDICES = torch.tensor([3, 1, 0, 2, 3, 1, 0, 2])

CRITERIA: dict[str, Callable[[Net], Criterion]] = {
    "a method of the module around": method,
    "a parameter of the module around": of(times_scale),
    "a module": of_head,
    "a module that another module has, too": of_shared_head,
    "a penalty over parameters": of(with_penalty),
    "a penalty over parameters that were listed before": of(with_listed_penalty),
    "the weight of the first layer, in the end": of(by_first_weight),
    "layers that it freezes when it has used them": of(as_in_a_gan),
    "an embedding with sparse gradients": of(sparse),
    "one that has sparse and dense gradients": of(sparse_and_dense),
    "a reentrant checkpoint": of(reentrant),
    "the model, without gradients": of(consistent),
    "the model, with gradients": of(twice),
    "nothing, of some micro-batches": of(sometimes_nothing),
}
"""For each thing that a criterion can use, a function that makes the criterion for a net."""


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, WIDTH, generator=draw)
    target = torch.randn(8, WIDTH, generator=draw)
    return x, target


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def gradients(net: Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.fixture(scope="module", params=CRITERIA)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor | None]]:
    """Return a criterion's name, and the gradients that a pipeline must have after two steps.

    The same layers compute them without a pipeline, and add up the gradients of both steps.
    """
    net, (x, t) = made(), batch()
    criterion = CRITERIA[request.param](net)
    for _ in range(2):
        for part, target in zip(x.chunk(4), t.chunk(4), strict=True):
            loss = criterion(net.layers(part), target) / 4
            if loss.requires_grad:
                loss.backward()
    return request.param, gradients(net)


@pytest.mark.quick(40)
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_a_criterion(
    case: tuple[str, dict[str, Tensor | None]], engine: Any, schedule: str, mode: Any
) -> None:
    name, expected = case
    twice = schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    taking = [name for name, grad in expected.items() if grad is not None]
    for _ in range(ROUNDS if engine == "workers" else 1):
        net, (x, t) = made(), batch()
        before = dict(net.named_parameters())
        values = [p.detach().clone() for p in before.values()]
        net.layers = GPipe(
            net.layers,
            [2, 2, 2, 2] if twice else [4, 4],
            devices=["cpu"] * 2,
            chunks=4,
            schedule=schedule,
            engine=engine,
            checkpoint=mode,
        )
        criterion = CRITERIA[name](net)
        for _ in range(2):
            net.layers.step(criterion, x, t)
        assert differences(gradients(net), expected, REORDERED) == []
        after = dict(net.named_parameters())
        assert after == before
        assert all(map(torch.equal, before.values(), values))
        # A hook of a parameter runs once in a step.
        assert sorted(net.hooked) == sorted(2 * taking)


@pytest.mark.parametrize("where", ["in the layers", "in the criterion"])
def test_a_step_that_fails_changes_no_gradient_of_what_the_criterion_uses(where: str) -> None:
    net, (x, t) = made(), batch()
    net.layers = GPipe(net.layers, [4, 4], devices=["cpu"] * 2, chunks=4, schedule="1F1B")

    def criterion(y: Tensor, target: Tensor) -> Tensor:
        if where == "in the criterion" and torch.equal(target, t[6:]):
            raise ArithmeticError
        return F.mse_loss(y * net.scale, target)

    net.layers.step(partial(times_scale, net), x, t)
    before = copy.deepcopy(gradients(net))
    if where == "in the layers":
        calls = count(1)

        def fail(*_: Any) -> None:
            if next(calls) == 4:
                raise ArithmeticError

        net.layers[6].register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        net.layers.step(criterion, x, t)
    assert differences(gradients(net), before) == []


class Tied(Module):
    """A layer that shares the weight of an embedding.

    It keeps the embedding in a list, so that PyTorch does not register it as a submodule.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding[0].weight)


def tied_layers() -> Sequential:
    torch.manual_seed(0)
    embedding = Embedding(20, WIDTH)
    return Sequential(embedding, Linear(WIDTH, WIDTH), Tanh(), Tied(embedding))


def stepping(model: Any, loss: Criterion, x: Tensor) -> None:
    model.step(loss, x, x)


def calling(model: Any, loss: Criterion, x: Tensor) -> None:
    loss(model(x), x).backward()


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("train", [stepping, calling])
@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_a_weight_in_a_list_of_a_layer_of_another_stage_gets_both_gradients(
    engine: Any, train: Callable[[Any, Criterion, Tensor], None], mode: Any
) -> None:
    plain, x = tied_layers(), torch.arange(16)
    for _ in range(2):
        F.cross_entropy(plain(x), x).backward()
    for _ in range(ROUNDS):
        tied = tied_layers()
        before = tied[0].weight.detach().clone()  # type: ignore[operator]
        options: dict[str, Any] = {"checkpoint": mode, "schedule": "1F1B", "engine": engine}
        model = GPipe(tied, [2, 2], devices=["cpu"] * 2, chunks=8, **options)
        for _ in range(2):
            train(model, F.cross_entropy, x)
        assert torch.equal(tied[0].weight, before)  # type: ignore[arg-type]
        assert differences(gradients(tied), gradients(plain), 1e-4) == []


@pytest.mark.parametrize("engine", ["workers", "graph"])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_criterion_may_call_another_pipeline_that_shares_layers(engine: Any, mode: Any) -> None:
    def parts() -> list[Any]:
        torch.manual_seed(0)
        return [Sequential(Linear(4, 4), Tanh()), Linear(4, 4), Linear(4, 4)]

    encoder, decoder, head = parts()
    x, t = torch.rand(2, 6, 4)
    options: dict[str, Any] = {
        "devices": ["cpu"] * 2,
        "chunks": 2,
        "checkpoint": mode,
        "engine": engine,
    }
    first = GPipe(Sequential(encoder, decoder), [1, 1], schedule="1F1B", **options)
    second = GPipe(Sequential(encoder, head), [1, 1], **options)
    hooked: list[str] = []
    head.weight.register_hook(lambda grad: hooked.append("head"))
    first.step(lambda y, target: F.mse_loss(y, second(target)), x, t)
    ours, plain = [encoder, decoder, head], parts()
    encoder, decoder, head = plain
    for part, target in zip(x.chunk(2), t.chunk(2), strict=True):
        loss = F.mse_loss(decoder(encoder(part)), head(encoder(target))) / 2
        loss.backward()
    assert differences(ours, plain, REORDERED) == []
    assert len(hooked) == 1


def test_a_criterion_that_never_has_a_graph_is_refused() -> None:
    net, (x, t) = made(), batch()
    model = GPipe(net.layers, [4, 4], devices=["cpu"] * 2, chunks=4)
    with pytest.raises(RuntimeError, match="a loss without a graph for every micro-batch"):
        model.step(lambda y, target: F.mse_loss(y.detach(), target), x, t)


def test_a_criterion_may_not_go_backward_through_another_mini_batch_of_its_pipeline() -> None:
    net, (x, t) = made(), batch()
    model = GPipe(net.layers, [4, 4], devices=["cpu"] * 2, chunks=4)
    earlier = model(x).sum()

    def criterion(y: Tensor, target: Tensor) -> Tensor:
        earlier.backward()
        return F.mse_loss(y, target)

    with pytest.raises(RuntimeError, match="in the middle of another mini-batch"):
        model.step(criterion, x, t)
    earlier.backward()
    assert all(p.grad is not None for p in model.parameters())
