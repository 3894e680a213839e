"""Several pipelines in one loss, one in another, and threads that use one or two at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ..plain import piped
from .compare import EXACT, REORDERED, assert_transparent, both, state, total

BALANCE = [2, 2, 2]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))


def test_two_pipelines_in_one_loss(way: dict[str, Any]) -> None:
    x, plain, models = torch.randn(9, 5), *zip(*(both(layers(), BALANCE, **way) for _ in range(2)), strict=True)
    for one, other in (plain, models):
        total((one(x) * other(x), other(x))).backward()
    # The second model is used twice: plain parameters add both uses up before .grad, piped ones each.
    assert_close([state(model) for model in models], [state(model) for model in plain], **REORDERED)


def test_a_pipeline_in_a_pipeline(way: dict[str, Any]) -> None:
    inner = piped(layers(), [3, 3], 2, **way)
    module = nn.Sequential(nn.Linear(5, 5), inner, nn.Tanh())
    # Both engines recompute and go backward per inner micro-batch, so gradients are added in another order.
    assert_transparent(module, torch.randn(12, 5).requires_grad_(), [1, 1, 1], tolerance=REORDERED, **way)


def in_threads(*functions: Callable[[], object]) -> list[BaseException]:
    """Run functions at once, each in a thread of its own; return what they raised."""
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
    return errors


def steps_of(run: nn.Module, xs: Tensor, outputs: list[Tensor]) -> Callable[[], None]:
    def steps() -> None:
        for x in xs:
            outputs.append(run(x))
            outputs[-1].square().sum().backward()

    return steps


STEPS = 12


# One parameter, so that each is combined with every engine and mode: whether threads meet is a matter of chance.
@pytest.mark.parametrize("case", [(2, 1), (2, 3), (1, 1), (1, 3)], ids=lambda case: "{} pipelines, m={}".format(*case))
def test_two_threads(case: tuple[int, int], way: dict[str, Any]) -> None:
    count, chunks = case
    pairs = [both(layers(), BALANCE, chunks=chunks, **way)] * 2
    if count == 2:
        pairs[1] = both(layers(), BALANCE, chunks=chunks, **way)
    xs = torch.randn(2, STEPS, 9, 5)
    outputs: list[list[Tensor]] = [[], []]
    expected: list[list[Tensor]] = [[], []]
    assert not in_threads(*(steps_of(pairs[k][1], xs[k], outputs[k]) for k in (0, 1)))
    for k in (0, 1):
        steps_of(pairs[k][0], xs[k], expected[k])()
    assert_close(outputs, expected, **EXACT)
    for plain, model in pairs:
        # Steps accumulate: sums in another order than the plain run's.
        assert_close(state(model)["gradients"], state(plain)["gradients"], **REORDERED)
        assert model[1].num_batches_tracked == 2 // count * STEPS * chunks
        assert model[1].track_running_stats and model[1].running_mean is not None


@pytest.mark.filterwarnings("error")  # neither's numbers may be taken for a layer's that drew unexpectedly
def test_threads_that_draw_random_numbers(way: dict[str, Any]) -> None:
    drawing = piped(nn.Sequential(*layers()[:5], nn.Dropout()), BALANCE, **way)
    quiet = piped(layers(), BALANCE, **way)
    errors = in_threads(*(steps_of(model, torch.randn(10, 9, 5), []) for model in (drawing, quiet, drawing)))
    # The graph engine's tasks draw from the one default generator. Where threads came between, it must say so.
    one_generator = way["engine"] == "graph" and way["checkpoint"] != "never"
    assert all(one_generator and "more or fewer random numbers" in str(error) for error in errors)
