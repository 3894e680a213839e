"""Test what the calls of a pipeline return on each rank.

The tests also check that wrong uses of these results raise errors, and that a rank without
parameters warns: it has nothing to give to an optimizer.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.functional import cross_entropy, mse_loss

from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.distributed.no_output import NoOutput
from torchgpipe.schedules import Action, Schedule
from torchgpipe.schedules.named import NAMED

from ...plain import TWICE

WORLD = 2
pytestmark = pytest.mark.ranks(WORLD)
X = torch.arange(16.0).view(4, 4).sin()
CLASSES = torch.tensor([0, 3, 1, 0])


def pipeline(**options: Any) -> DistributedGPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return DistributedGPipe(layers, [1, 1], chunks=2, **options)


def test_the_text_of_a_pipeline_names_the_rank() -> None:
    first, stage = repr(pipeline()).splitlines()
    rank = dist.get_rank()
    assert first.endswith(f"schedule='GPipe'): rank {rank} of 2")
    assert stage == f"  stage {rank} on cpu: 1 layer, 20 parameters"


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_backward_after_a_step_is_refused_on_all_ranks(schedule: str) -> None:
    model = pipeline(schedule=schedule)
    for _ in range(2):
        loss = model.step(mse_loss, X, X)
        with pytest.raises(RuntimeError, match=r"^step\(\) has run the backward already: remove"):
            loss.backward()


def test_arguments_in_the_wrong_order_are_refused_on_all_ranks() -> None:
    calls: list[Callable[[Any], object]] = [
        lambda model: model.step(X),
        lambda model: model.step(X, X),
        lambda model: model.step(X, X, mse_loss),
        lambda model: model.evaluate(X, X),
        lambda model: model.loss(X, X, mse_loss),
    ]
    for call in calls:
        model = pipeline()
        dist.barrier()
        with pytest.raises((TypeError, RankFailed), match="the criterion must be a function"):
            call(model)
        model.close()


def test_a_scaler_of_one_rank_is_refused() -> None:
    """Check that ranks refuse PyTorch's `GradScaler`, which sees only one rank's gradients.

    After an overflow on one rank, only this rank's scaler would use a smaller scale.
    """
    plain = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = pipeline()
    dist.barrier()
    with pytest.raises((TypeError, RankFailed), match=r"give each rank a ShardedGradScaler\(\)"):
        model.step(mse_loss, X, X, scaler=plain)
    model.close()
    model.step(mse_loss, X, X, scaler=torch.amp.GradScaler("cpu", enabled=False))
    expected = [8 * p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.step(mse_loss, X, X, scaler=ShardedGradScaler("cpu", init_scale=8.0))
    assert expected
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad)  # a power of two changes no digit


USES: dict[str, Callable[[Any], object]] = {
    "a loss of PyTorch": lambda y: cross_entropy(y, CLASSES),
    "a module that is a loss": lambda y: nn.MSELoss()(y, X),
    "a loss by hand": lambda y: (y - X).square().mean(),
    "a loss of flattened scores": lambda y: cross_entropy(y.flatten(0, 1), CLASSES),
    "a loss of scores in a vector": lambda y: cross_entropy(y.view(-1), CLASSES),
    "all but the last": lambda y: y[:, :-1],
    "an entry": lambda y: y["logits"],
    "two outputs": lambda y: [*y],
    "an attribute": lambda y: y.logits,
    "the most likely class": lambda y: y.argmax(1),
}


@pytest.mark.parametrize("name", USES)
def test_the_output_is_not_used_on_other_ranks(name: str) -> None:
    model = pipeline()
    output = model(X)
    if model.rank == WORLD - 1:
        assert type(output) is Tensor
    else:
        with pytest.raises((RuntimeError, TypeError, AttributeError)) as caught:
            USES[name](output)
        assert str(caught.value).startswith("only the rank of the last stage has the output")
        assert "\n" not in str(caught.value)
        assert not hasattr(output, "logits")
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_other_ranks_get_is_a_scalar_with_a_backward() -> None:
    model = pipeline()
    x = X.clone().requires_grad_()
    outputs = [model(x) for _ in range(3)]
    if model.rank == WORLD - 1:
        for output in outputs:
            output.sum().backward()
        return
    first, second, third = outputs
    assert f"{first:.2f} {first.item()}" == "0.00 0.0"
    penalty = torch.ones((), requires_grad=True)
    (2 * first + penalty * second.detach() + penalty).backward()
    assert penalty.grad == 1
    second.backward(torch.ones(()))
    assert type(x.grad) is Tensor
    (gradient,) = torch.autograd.grad(third, x)
    assert type(gradient) is Tensor
    torch.testing.assert_close(2 * gradient, x.grad)
    assert isinstance(third, NoOutput)


def test_a_rank_without_parameters_is_told_how_to_make_its_optimizer() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedGPipe(layers, [1, 1], chunks=2)
        DistributedGPipe(nn.Sequential(nn.Tanh(), nn.ReLU()), [1, 1])
    lines = [str(each.message) for each in caught]
    if model.rank == 0:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("rank 1 has no parameters")
        assert "torch.optim.SGD([{'params': list(model.parameters())}], lr=0.1)" in line
        assert caught[0].filename == __file__
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1)
    model.step(mse_loss, X, X)
    optimizer.step()


def test_a_batch_norm_that_sees_forwards_out_of_order_is_told_on_its_rank() -> None:
    forwards = [Action("forward", 1, 0), Action("forward", 0, 0)]
    backwards = [Action("backward", 1, 0), Action("backward", 0, 0)]
    lists = [forwards + backwards, of_stage_1(forwards + backwards)]
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedGPipe(layers, [1, 1], chunks=2, schedule=Schedule("mine", [0, 1], lists))
    lines = [str(each.message) for each in caught]
    if model.rank == 0:
        assert lines == []
    else:
        (line,) = lines
        assert "mine does not run the forwards of its micro-batches in order" in line
        assert caught[0].filename == __file__


def of_stage_1(actions: list[Action]) -> list[Action]:
    return [Action(action.kind, action.micro_batch, 1) for action in actions]


@pytest.mark.parametrize("schedule", NAMED)
def test_several_gradients_in_one_call_are_refused_on_all_ranks(schedule: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    balance = [1, 1, 1, 1] if schedule in TWICE else [2, 2]
    model = DistributedGPipe(layers, balance, chunks=2, schedule=schedule)
    results = [model(X), model.loss(mse_loss, X, X)]
    for result in results:
        grads = torch.ones(3, *result.shape)
        with pytest.raises(RuntimeError, match=r"is_grads_batched=True, jacobian\(vectorize=True"):
            torch.autograd.grad(result, [*model.parameters()], grads, is_grads_batched=True)


def test_it_moves_only_to_where_it_is() -> None:
    """Check that `model.to` accepts only the device and dtype that the model already has.

    Training frameworks make such calls, which change nothing and must not fail.
    """
    model = pipeline()
    for there in ("cpu", torch.device("cpu"), torch.float32, X):
        assert model.to(there) is model
    assert model.cpu() is model
    with pytest.raises(TypeError, match=r"cannot be moved; .* or device=… on a rank"):
        model.to("meta")


def test_after_the_process_group_was_destroyed() -> None:
    """Check calls of a pipeline after the process group was destroyed.

    A pipeline that is open still works. After `close`, a call raises an error which says that there
    is no process group.
    """
    model = pipeline()
    loss = model.step(mse_loss, X, X)
    dist.barrier()
    dist.destroy_process_group()
    torch.testing.assert_close(model.step(mse_loss, X, X), loss)
    model.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"there is no process group.*after the last call"):
            model.step(mse_loss, X, X)
