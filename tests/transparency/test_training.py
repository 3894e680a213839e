"""Training: whole steps with an optimizer, several pipelines, several threads, layers that work in place."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))


def piped(module: nn.Sequential, way: dict[str, Any], **options: Any) -> GPipe:
    return GPipe(module, [2, 2, 2], devices=["cpu"] * 3, **{"chunks": 3, **way, **options})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps(
    optimizer: Callable[[Any], torch.optim.Optimizer], set_to_none: bool, way: dict[str, Any], plainly: Any
) -> None:
    module = layers()
    plain = plainly(copy.deepcopy(module), 3)
    model = piped(module, way)
    optimizers = {run: optimizer(run.parameters()) for run in (plain, model)}
    for x, target in zip(torch.randn(3, 9, 5), torch.randn(3, 9, 4), strict=True):
        losses = []
        for run in (plain, model):
            optimizers[run].zero_grad(set_to_none=set_to_none)
            losses.append(nn.functional.mse_loss(run(x), target))
            losses[-1].backward()
            optimizers[run].step()
        assert torch.equal(*losses)
        expected = plain.layers.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_gradients_stay_where_they_are(way: dict[str, Any]) -> None:
    model = piped(layers(), way)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    views = flat.split([p.numel() for p in model.parameters()])
    for p, view in zip(model.parameters(), views, strict=True):
        p.grad = view.view_as(p)
    before = [p.grad for p in model.parameters()]
    for _ in range(2):
        model(torch.randn(9, 5)).square().sum().backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert all(bool(view.any()) for view in views[2:])


def test_parameters_are_the_wrapped_modules_own(way: dict[str, Any]) -> None:
    module = layers()
    before = dict(module.named_parameters())
    model = piped(module, way)
    optimizer = torch.optim.SGD(before.values(), lr=0.1)
    model(torch.randn(9, 5)).square().sum().backward()
    optimizer.step()
    assert all(p is before[name] and p.grad is not None for name, p in model.named_parameters())


def test_two_pipelines_in_one_loss(way: dict[str, Any], plainly: Any, loss_of: Any) -> None:
    modules = [layers(), layers()]
    plain = [plainly(copy.deepcopy(module), 3) for module in modules]
    models = [piped(module, way) for module in modules]
    x = torch.randn(9, 5)
    for one, other in (plain, models):
        loss_of((one(x) * other(x), other(x))).backward()
    for model, reference in zip(models, plain, strict=True):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            # The second model is used twice: plain parameters add both uses up before .grad, piped ones each.
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-4)


def test_a_pipeline_in_a_pipeline(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    inner = GPipe(layers(), [3, 3], devices=["cpu"] * 2, chunks=2, **way)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 5), inner, nn.Tanh())

    # Both engines recompute and go backward per inner micro-batch, so gradients are added in another order.
    x = torch.randn(12, 5).requires_grad_()
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    equals_plain(build, x, [1, 1, 1], tolerance=tolerance, **way)


def in_threads(*functions: Callable[[], object]) -> None:
    """Run functions at once, each in a thread of its own; raise what one of them raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


STEPS = 6


def outputs_of(run: nn.Module, xs: Tensor, outputs: list[Tensor]) -> Callable[[], None]:
    def steps() -> None:
        for x in xs:
            outputs.append(run(x))
            outputs[-1].square().sum().backward()

    return steps


@pytest.mark.parametrize("chunks", [1, 3])
def test_two_pipelines_in_two_threads(chunks: int, way: dict[str, Any], plainly: Any) -> None:
    modules = [layers(), layers()]
    plain = [plainly(copy.deepcopy(module), chunks) for module in modules]
    models = [piped(module, way, chunks=chunks) for module in modules]
    xs = torch.randn(2, STEPS, 9, 5)
    outputs: list[list[Tensor]] = [[], []]
    expected: list[list[Tensor]] = [[], []]
    in_threads(*(outputs_of(models[k], xs[k], outputs[k]) for k in (0, 1)))
    for k in (0, 1):
        outputs_of(plain[k], xs[k], expected[k])()
        assert all(map(torch.equal, outputs[k], expected[k]))
        for p, q in zip(models[k].parameters(), plain[k].parameters(), strict=True):
            # Steps accumulate: sums in another order than the plain run's.
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("chunks", [1, 3])
def test_one_pipeline_in_two_threads(chunks: int, way: dict[str, Any], plainly: Any) -> None:
    module = layers()
    plain = plainly(copy.deepcopy(module), chunks)
    model = piped(module, way, chunks=chunks)
    xs = torch.randn(2, STEPS, 9, 5)
    outputs: list[list[Tensor]] = [[], []]
    expected: list[list[Tensor]] = [[], []]
    in_threads(*(outputs_of(model, xs[k], outputs[k]) for k in (0, 1)))
    for k in (0, 1):
        outputs_of(plain, xs[k], expected[k])()
        assert all(map(torch.equal, outputs[k], expected[k]))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        # As above.
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-4)
    norm = model[1]
    assert norm.num_batches_tracked == 2 * STEPS * chunks
    assert norm.track_running_stats and norm.running_mean is not None


def test_threads_that_draw_random_numbers(way: dict[str, Any]) -> None:
    # -W error: neither's numbers may be taken for a layer's that drew unexpectedly.
    def steps(model: nn.Module, x: Tensor) -> Callable[[], None]:
        return lambda: [model(x).sum().backward() for _ in range(10)] and None

    drawing = piped(nn.Sequential(*layers()[:5], nn.Dropout()), way)
    quiet = piped(layers(), way)
    in_threads(*(steps(model, torch.randn(9, 5)) for model in (drawing, quiet, drawing)))


class AddOne(nn.Module):
    """Work in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def in_place(kind: str) -> nn.Sequential:
    def inplace() -> nn.Module:
        return nn.ReLU(inplace=True) if kind == "relu" else AddOne()

    return nn.Sequential(nn.Linear(5, 5), inplace(), nn.Linear(5, 5), inplace(), nn.Linear(5, 4))


@pytest.mark.parametrize("kind", ["relu", "add"])
def test_in_place_within_a_partition(kind: str, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    equals_plain(lambda: in_place(kind), torch.randn(7, 5).requires_grad_(), [2, 3], **way)


@pytest.mark.parametrize("kind", ["relu", "add"])
def test_in_place_at_a_partitions_start(kind: str, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    x = torch.randn(7, 5).requires_grad_()
    # A layer that says so (`inplace`) gets a copy to work on.
    if way["checkpoint"] == "never" or kind == "relu":
        equals_plain(lambda: in_place(kind), x, [1, 2, 2], steps=3, **way)
    else:
        with pytest.raises(RuntimeError, match=r"partition \d changed its input in place"):
            equals_plain(lambda: in_place(kind), x, [1, 2, 2], **way)


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1]], ids=str)
def test_in_place_at_the_models_start(balance: list[int], way: dict[str, Any], plainly: Any) -> None:
    # Micro-batches are parts of one tensor, for which PyTorch would refuse this in a plain loop: so out of place there.
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5), nn.Tanh())
    plain = plainly(nn.Sequential(nn.ReLU(), *copy.deepcopy(module)[1:]), 3)
    model = GPipe(module, balance, devices=["cpu"] * len(balance), chunks=3, **way)
    for x in torch.randn(2, 7, 5):
        before = x.clone()
        for run in (plain, model):
            run.zero_grad()
            run(x).square().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        assert torch.equal(x, before)
