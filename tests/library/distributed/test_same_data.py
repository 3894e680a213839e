"""Test that the last rank warns once if the ranks get different samples.

The tests also check what docs/data.md says about the data of ranks.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchgpipe.distributed import DistributedGPipe
from torchgpipe.distributed.same_data import EVERY, checksums

LAST = 2
OTHER = "rank 0 and rank 2 were given different {}s for the same mini-batch"

pytestmark = pytest.mark.ranks(LAST + 1)


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(5, 5) for _ in range(count)]
    return nn.Sequential(*linears)


def made() -> DistributedGPipe:
    return DistributedGPipe(layers(), [1] * 3, chunks=2)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 5, generator=drawn)
    target = torch.randint(5, (8,), generator=drawn)
    return x, target


@contextmanager
def warned() -> Iterator[list[str]]:
    """Record warnings until the `with` block ends. Then put their texts into the yielded list."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        said: list[str] = []
        yield said
    said += [str(each.message) for each in noted]


def by_step(model: Any, x: Any, target: Any) -> Tensor:
    loss: Tensor = model.step(cross_entropy, x, target)
    return loss


def by_loss(model: Any, x: Any, target: Any) -> Tensor:
    loss: Tensor = model.loss(cross_entropy, x, target)
    loss.backward()
    return loss.detach()


def by_evaluating(model: Any, x: Any, target: Any) -> Tensor:
    loss: Tensor = model.evaluate(cross_entropy, x, target)
    return loss


def assert_one_warning_on_the_last_rank(said: list[str], what: str) -> None:
    if dist.get_rank() != LAST:
        assert said == []
        return
    (message,) = said
    assert message.startswith(OTHER.format(what))


@pytest.mark.parametrize("call", [by_step, by_loss, by_evaluating])
def test_samplers_that_differ_are_told_once(call: Callable[[Any, Any, Any], Tensor]) -> None:
    """Check that several calls cause only one warning if the ranks get different samples.

    The loss must be computed from the first rank's input and the last rank's target.
    """
    rank = dist.get_rank()
    model = made()
    with warned() as said:
        losses = [call(model, *batch(10 * k + rank)) for k in range(4)]
    assert_one_warning_on_the_last_rank(said, "target")

    again = made()
    for k, loss in enumerate(losses):
        x, _ = batch(10 * k)
        _, target = batch(10 * k + LAST)
        assert loss == call(again, x, target)


def test_inputs_are_compared_without_targets() -> None:
    """Check that the last rank warns about different inputs if it cannot compare targets.

    A call `model(x)` has no target. In the call of `step`, rank 0 passes `None` as its target.
    """
    rank = dist.get_rank()
    x, _ = batch(rank)
    _, target = batch(0)

    model = made()
    with warned() as said:
        model(x)
    assert_one_warning_on_the_last_rank(said, "input")

    model = made()
    with warned() as said:
        by_step(model, x, None if rank == 0 else target)
    assert_one_warning_on_the_last_rank(said, "input")


PLACEHOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "empty": lambda x: torch.empty(0),
    "on meta": lambda x: x.to("meta"),
    "zeros of this shape": torch.zeros_like,
    "one zero": lambda x: torch.zeros(1),
    "a tuple of zeros": lambda x: (torch.zeros_like(x), None),
    "the same": lambda x: x,
    "a parameter": lambda x: nn.Parameter(torch.randn(2, 2)),
    "a word": lambda x: "nothing",
    "sparse": lambda x: torch.randn(3, 3).to_sparse(),
}


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_placeholders_are_no_other_data(name: str) -> None:
    rank = dist.get_rank()
    placeholder = PLACEHOLDERS[name]
    x, target = batch(0)
    model = made()
    with warned() as said:
        given_x = x if rank == 0 else placeholder(x)
        given_target = target if rank == LAST else placeholder(target)
        by_step(model, given_x, given_target)
    assert said == []


def test_inputs_may_be_augmented_on_each_rank() -> None:
    """Check that ranks with the same targets do not warn about different inputs."""
    x, target = batch(0)
    with warned() as said:
        by_step(made(), x + dist.get_rank(), target)
    assert said == []


def test_data_of_one_rank() -> None:
    """Check that no rank warns about different data if only the data of rank 0 are used.

    A pipeline uses only these data if rank 0 has both the first and the last stage. In the test,
    each rank gets other data.
    """
    model = DistributedGPipe(layers(6), [1] * 6, chunks=2, schedule="ZBVZeroBubble")
    with warned() as said:
        by_step(model, *batch(dist.get_rank()))
    assert said == []


def test_only_some_mini_batches_are_compared() -> None:
    x, target = batch(0)
    compared = set()
    for serial in range(1, 2 * EVERY + 1):
        if checksums(serial, x, target) != [0, 0]:
            compared.add(serial)
    assert compared == {1, 2, 3, EVERY, 2 * EVERY}
    model = made()
    model._serial = EVERY - 2  # the next numbers are EVERY - 1, EVERY and EVERY + 1
    for expected in (0, dist.get_rank() == LAST, 0):
        with warned() as said:
            by_step(model, *batch(dist.get_rank()))
        assert len(said) == expected


def test_ranks_that_need_no_data_load_none() -> None:
    x, target = batch(0)
    everywhere, where_needed = made(), made()
    placement = where_needed.schedule.placement
    used = where_needed.rank in (placement[0], placement[-1])
    given = (x, target) if used else (None, None)
    loss = by_step(where_needed, *given)
    assert loss == by_step(everywhere, x, target)
    for p, expected in zip(where_needed.parameters(), everywhere.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, rtol=0, atol=0)


def test_a_penalty_of_all_ranks_is_added_after_the_step() -> None:
    """Check that a second backward after the step can add a penalty on all ranks' parameters.

    A penalty in the criterion includes only the last rank's parameters, because only this rank
    calls the criterion. The test also checks this.
    """

    def penalty(model: nn.Module) -> Tensor:
        squares = [p.square().sum() for p in model.parameters()]
        return torch.stack(squares).sum()

    x, target = batch(0)
    after, within, plain = made(), made(), layers()
    by_step(after, x, target)
    penalty(after).backward()
    within.step(lambda y, target: cross_entropy(y, target) + penalty(within), x, target)
    loss = cross_entropy(plain(x), target) + penalty(plain)
    loss.backward()
    expected: dict[str, Any] = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in after.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])
    for name, p in within.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, expected[name]) == (dist.get_rank() == LAST)
