"""Test what is refused of tied weights, and how ranks go on after a failure."""

import time
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, linear

from torchgpipe.distributed import DistributedGPipe, RankFailed, tied
from torchgpipe.schedules.named import NAMED

from ...behaviours.compare import REORDERED, differences
from ...plain import TWICE
from .test_tied import WIDTH, WORDS, WORLD, gpt, words

pytestmark = pytest.mark.ranks(WORLD)


def test_a_criterion_of_loss_that_uses_the_weight_is_refused() -> None:
    layers = gpt()
    model = DistributedGPipe(layers, [1, 2, 1], chunks=2)

    def penalized(y: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(y, target) + layers[3].weight.square().sum()  # type: ignore[operator]

    with pytest.raises(
        (RuntimeError, RankFailed), match=r"of loss\(\) uses a parameter that several ranks"
    ):
        model.loss(penalized, *words())


def assert_refused_where_used(model: DistributedGPipe, message: str) -> None:
    """Assert that a step raises an error on ranks 0 and 2, which have the shared weight.

    Rank 1 may raise no error, because it may already have finished its part of the step.
    """
    # Wait until all ranks have made their pipeline. Otherwise, if a rank failed in its first call,
    # another rank could raise this error while it still makes its pipeline.
    dist.barrier()
    error = ""
    try:
        model.step(cross_entropy, *words())
    except (RuntimeError, TypeError, RankFailed) as raised:
        error = str(raised)
    assert message in error or (model.rank == 1 and not error)


def freeze_one_copy(model: DistributedGPipe) -> None:
    if model.rank == 2:
        model.partition[0].weight.requires_grad_(False)


def change_one_copy(model: DistributedGPipe) -> None:
    if model.rank == 2:
        with torch.no_grad():
            next(model.parameters()).add_(1)


@pytest.mark.parametrize(
    "change, message",
    [
        (freeze_one_copy, "are one parameter, but only some of them require grad"),
        (change_one_copy, "are one parameter, but their values differ; load the same state"),
    ],
)
def test_copies_that_differ_are_refused(
    change: Callable[[DistributedGPipe], None], message: str
) -> None:
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=2)
    change(model)
    message = f"'0.weight' on rank 0 and '3.weight' on rank 2 {message}"
    assert_refused_where_used(model, message)


@pytest.mark.parametrize("alike", [0, 2, 4])
def test_copies_are_compared_again_later(alike: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a later step notices copies that differ because learning rates differ.

    The learning rates are equal in the first `alike` steps. Copies are compared in the mini-batches
    1, 2, 4 and so on and, in this test, in every sixth.
    """
    monkeypatch.setattr(tied, "COMPARED_EVERY", 6)
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(alike + 1):
        if step == alike:
            optimizer.param_groups[0]["lr"] = 0.1 * model.rank
        model.step(cross_entropy, *words())
        optimizer.step()
        optimizer.zero_grad()
    assert_refused_where_used(model, "give the optimizers of these ranks the same")


class Listed(nn.Module):
    """A last layer that uses the weight of the first layer, an embedding, without owning it.

    The embedding is in a list, so that PyTorch does not see it as a submodule of this layer.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = [embedding]
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.embedding[0].weight, self.bias)


class InClosure(nn.Module):
    """A last layer that uses the weight of the first layer, an embedding, in a closure."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.product = lambda x: linear(x, embedding.weight)
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x)
        return y + self.bias


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", [Listed, InClosure])
@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_weight_in_a_list_or_closure_is_refused(
    checkpoint: Any, schedule: str, kind: Callable[[nn.Embedding], nn.Module]
) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        first = nn.Embedding(WORDS, WIDTH)
        between = [nn.Linear(WIDTH, WIDTH) for _ in range(4 if schedule in TWICE else 1)]
        return nn.Sequential(first, *between, kind(first))

    layers, plain = made(), made()
    options: dict[str, Any] = {"checkpoint": checkpoint, "schedule": schedule}
    model = DistributedGPipe(layers, [1] * len(layers), chunks=2, **options)
    model.evaluate(cross_entropy, *words())  # this has no gradients, and finds nothing
    if schedule == "ZBVZeroBubble":  # rank 0 has the first and the last layer
        model.step(cross_entropy, *words())
        x, target = words()
        cross_entropy(plain(x), target).backward()
        expected = {name: p.grad for name, p in plain.named_parameters()}
        for name, p in model.named_parameters():
            assert differences({"": p.grad}, {"": expected[name]}, REORDERED) == [], name
        return
    message = "layer of partition . uses the parameter '0.weight', which only layers of another"
    with pytest.raises((RuntimeError, RankFailed), match=message):
        model.step(cross_entropy, *words())


def test_a_weight_that_is_sharded_is_refused() -> None:
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("pp", "dp"))
    fully_shard(model.partition, mesh=mesh["dp"])
    assert_refused_where_used(model, "are one parameter, and it is a DTensor")


def test_copies_whose_values_are_all_nan_are_alike() -> None:
    """Check that a training that has failed is not told that its copies differ."""
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(nan)
    assert model.step(cross_entropy, *words()).isnan()


def test_a_training_goes_on_after_a_failed_backward() -> None:
    """Check that all ranks compare copies in the same mini-batches after `close`.

    When rank 0 fails, rank 2 has already finished its actions, and has counted the mini-batch.
    """
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=4, schedule="1F1B")
    model.step(cross_entropy, *words())
    handles = []
    backwards: list[Tensor] = []
    if model.rank == 0:

        def fail(grad: Tensor) -> None:
            backwards.append(grad)
            if len(backwards) == 4:  # the last backward of rank 0, which comes after all of rank 2
                time.sleep(0.5)
                raise ValueError("no gradient")

        def add_hook(_: Any, __: Any, output: Tensor) -> None:
            if output.requires_grad:  # not in the first pass of a checkpointed task
                output.register_hook(fail)

        handles.append(model.partition[0].register_forward_hook(add_hook))
    with pytest.raises((ValueError, RankFailed), match="no gradient"):
        for _ in range(2):  # rank 1 has no copy, and hears of the failure in the next mini-batch
            model.step(cross_entropy, *words())
    model.close()
    for handle in handles:
        handle.remove()
    for seed in range(8):
        model.step(cross_entropy, *words(seed))
