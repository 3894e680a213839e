"""What a criterion may use beside an output: all of it gets its gradient, once a step, and the layers stay whole.

Timing decides whether threads disturb each other, so each case runs several rounds of two accumulated steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from torchgpipe import GPipe
from torchgpipe.schedules.named import NAMED

from .compare import REORDERED, differences

WIDTH, ROUNDS = 16, 4
Criterion = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A module with a pipeline, or plain layers, and a criterion; as users of training frameworks write them."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.layers: Any = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.sparse = nn.Embedding(4, WIDTH, sparse=True)
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


def consistent(net: Net, y: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        again = net.layers(t)
    return F.mse_loss(y, again)


def as_in_a_gan(net: Net, y: Tensor, t: Tensor) -> Tensor:
    net.head.requires_grad_(True)
    loss = F.mse_loss(net.head(y), t)
    net.head.requires_grad_(False)
    return loss


def sparse_and_dense(net: Net, y: Tensor, t: Tensor) -> Tensor:
    found = net.sparse(INDICES[: len(y)]) if t[0, 0] > 0 else net.sparse.weight[: len(y)]
    return F.mse_loss(y + found, t)


INDICES = torch.tensor([3, 1, 0, 2, 3, 1, 0, 2])

# What makes a criterion of a net.
CRITERIA: dict[str, Callable[[Net], Criterion]] = {
    "a method of the module around": lambda net: net.loss,
    "a parameter of the module around": lambda net: lambda y, t: F.mse_loss(y * net.scale, t),
    "a module": lambda net: Head(net.head),
    "a module that another module has, too": lambda net: Head(
        nn.Sequential(net.head, net.layers[-2])
    ),
    "a penalty over parameters": lambda net: (
        lambda y, t: F.mse_loss(y, t) + penalty(net.layers.parameters())
    ),
    "a penalty over parameters that were listed before": lambda net: (
        lambda y, t: F.mse_loss(y, t) + penalty(net.listed)
    ),
    "the weight of the first layer, in the end": lambda net: (
        lambda y, t: F.mse_loss(F.linear(y, net.listed[0]), t)
    ),
    "layers that it freezes when it has used them": lambda net: partial(as_in_a_gan, net),
    "an embedding with sparse gradients": lambda net: (
        lambda y, t: F.mse_loss(y + net.sparse(INDICES[: len(y)]), t)
    ),
    "one that has sparse and dense gradients": lambda net: partial(sparse_and_dense, net),
    "a reentrant checkpoint": lambda net: (
        lambda y, t: F.mse_loss(checkpointed(F.tanh, y, use_reentrant=True), t)
    ),
    "the model, without gradients": lambda net: partial(consistent, net),
    "nothing, of some micro-batches": lambda net: (
        lambda y, t: F.mse_loss(y, t) if t[0, 0] > 0 else torch.zeros(())
    ),
}


class Head(nn.Module):
    """A criterion that is a module with parameters."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(self.head(y), t)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def gradients(net: Net) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.fixture(scope="module", params=CRITERIA)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor | None]]:
    """Return a criterion's name, and the gradients of plain layers after two accumulated steps."""
    net, (x, t) = made(), batch()
    criterion = CRITERIA[request.param](net)
    for _ in range(2):
        for part, target in zip(x.chunk(4), t.chunk(4), strict=True):
            loss = criterion(net.layers(part), target) / 4
            if loss.requires_grad:
                loss.backward()
    return request.param, gradients(net)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_a_criterion(
    case: tuple[str, dict[str, Tensor | None]], engine: Any, schedule: str, mode: Any
) -> None:
    name, expected = case
    twice = schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    for _ in range(ROUNDS if engine == "workers" else 1):
        net, (x, t) = made(), batch()
        before = {name: (p, p.detach().clone()) for name, p in net.named_parameters()}
        balance = [2] * 4 if twice else [4, 4]
        net.layers = GPipe(
            net.layers,
            balance,
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
        assert {name: p for name, p in net.named_parameters()} == {
            name: p for name, (p, _) in before.items()
        }
        assert all(torch.equal(p, copy) for p, copy in before.values())
        # A hook of a parameter runs once a step.
        assert sorted(net.hooked) == sorted(
            2 * [name for name, grad in expected.items() if grad is not None]
        )


@pytest.mark.parametrize("where", ["in the layers", "in the criterion"])
def test_a_step_that_fails_changes_no_gradient_of_what_the_criterion_uses(where: str) -> None:
    net, (x, t) = made(), batch()
    net.layers = GPipe(net.layers, [4, 4], devices=["cpu"] * 2, chunks=4, schedule="1F1B")

    def criterion(y: Tensor, target: Tensor) -> Tensor:
        if where == "in the criterion" and torch.equal(target, t[6:]):
            raise ArithmeticError
        return F.mse_loss(y * net.scale, target)

    net.layers.step(lambda y, target: F.mse_loss(y * net.scale, target), x, t)
    before = {name: grad.clone() for name, grad in gradients(net).items() if grad is not None}
    if where == "in the layers":
        calls = [0]

        def fail(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == 4:
                raise ArithmeticError

        net.layers[6].register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        net.layers.step(criterion, x, t)
    assert differences(gradients(net), {**dict.fromkeys(gradients(net)), **before}) == []


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
    class Tied(nn.Module):
        def __init__(self, embedding: nn.Embedding) -> None:
            super().__init__()
            self.embedding = [embedding]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.embedding[0].weight)

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        embedding = nn.Embedding(20, WIDTH)
        return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Tanh(), Tied(embedding))

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y, t)

    plain, x = layers(), torch.arange(16)
    for _ in range(2):
        loss(plain(x), x).backward()
    for _ in range(ROUNDS):
        tied = layers()
        before = tied[0].weight.detach().clone()  # type: ignore[operator]
        options: dict[str, Any] = {"checkpoint": mode, "schedule": "1F1B", "engine": engine}
        model = GPipe(tied, [2, 2], devices=["cpu"] * 2, chunks=8, **options)
        for _ in range(2):
            train(model, loss, x)
        assert torch.equal(tied[0].weight, before)  # type: ignore[arg-type]
        assert (
            differences(
                [p.grad for p in tied.parameters()], [p.grad for p in plain.parameters()], 1e-4
            )
            == []
        )


@pytest.mark.parametrize("engine", ["workers", "graph"])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_criterion_may_call_another_pipeline_that_shares_layers(engine: Any, mode: Any) -> None:
    """Each parameter gets its gradient, and each hook runs once for each call."""

    def parts() -> list[Any]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4), nn.Linear(4, 4)]

    (encoder, decoder, head), (x, t) = parts(), torch.rand(2, 6, 4)
    options: dict[str, Any] = {
        "devices": ["cpu"] * 2,
        "chunks": 2,
        "checkpoint": mode,
        "engine": engine,
    }
    first = GPipe(nn.Sequential(encoder, decoder), [1, 1], schedule="1F1B", **options)
    second = GPipe(nn.Sequential(encoder, head), [1, 1], **options)
    hooked: list[str] = []
    head.weight.register_hook(lambda grad: hooked.append("head"))
    first.step(lambda y, target: F.mse_loss(y, second(target)), x, t)
    e, d, h = parts()
    for part, target in zip(x.chunk(2), t.chunk(2), strict=True):
        (F.mse_loss(d(e(part)), h(e(target))) / 2).backward()
    for ours, plain in ((encoder, e), (decoder, d), (head, h)):
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
