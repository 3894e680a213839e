"""Test plans for models whose layers share a parameter: their memory, and the gradient exchange."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Embedding, Linear, Sequential

from torchgpipe.plan import load_hardware, plan
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict.memory import DeviceBytes, setup_memory
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup

WORDS, WIDTH = 1000, 16
WEIGHT = WORDS * WIDTH * 4
"""The bytes of the weight that the first and the last layer share."""
INNER = 4 * (WIDTH * WIDTH + WIDTH)
"""The bytes of the parameters of a layer in between."""
NODE = replace(load_hardware("p40x8"), launch=1e-9, link_latency=1e-9)
WORDS_OF_TWO = torch.zeros(2, 4, dtype=torch.long)
ADAM = optimizer_named("adam", foreach=True)
NONE = optimizer_named("none", foreach=True)


def language_model(*, tied: bool, frozen: bool = False) -> Sequential:
    """Return a small language model: an embedding, two linear layers, and an output layer.

    If `tied`, the embedding and the output layer share a weight.
    """
    embedding = Embedding(WORDS, WIDTH)
    head = Linear(WIDTH, WORDS, bias=False)
    if tied:
        head.weight = embedding.weight
    for weight in (embedding.weight, head.weight):
        weight.requires_grad_(not frozen)
    return Sequential(embedding, Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH), head)


def predictor(**options: bool) -> Predictor:
    return Predictor(count(language_model(**options), WORDS_OF_TWO), NODE)


def memory(made: Predictor, *balance: int, **options: Any) -> list[DeviceBytes]:
    return setup_memory(made.counts, Setup(8, balance, 4, optimizer=ADAM, **options))


def test_a_device_with_both_layers_has_the_parameter_once() -> None:
    tied, apart = predictor(tied=True), predictor(tied=False)
    (one,) = memory(tied, 4)
    (two,) = memory(apart, 4)
    inputs = 8 * 4 * 8  # eight samples of four words
    assert one.parameters == WEIGHT + 2 * INNER + inputs
    assert two.parameters - one.parameters == WEIGHT
    assert one.optimizer == 2 * (WEIGHT + 2 * INNER)
    assert two.peak > one.peak


def test_a_schedule_that_puts_both_layers_on_one_device() -> None:
    made = predictor(tied=True)
    first, second = memory(made, 1, 1, 1, 1, schedule="ZBVZeroBubble")
    assert first.optimizer == 2 * WEIGHT
    assert second.optimizer == 2 * 2 * INNER
    setup = Setup(8, (1, 1, 1, 1), 4, optimizer=NONE, schedule="ZBVZeroBubble")
    assert made.exchange(setup) == 0


def test_each_of_two_devices_has_the_parameter() -> None:
    tied, apart = predictor(tied=True), predictor(tied=False)
    for ours, theirs in zip(memory(tied, 2, 2), memory(apart, 2, 2), strict=True):
        assert ours.parameters == theirs.parameters
        assert ours.optimizer == theirs.optimizer == 2 * (WEIGHT + INNER)
        assert ours.peak >= theirs.peak


@pytest.mark.parametrize("balance", [(4,), (1, 2, 1), (2, 2)])
def test_gradients_are_exchanged_once_a_step(balance: tuple[int, ...]) -> None:
    setup = Setup(8, balance, 4, optimizer=NONE)
    tied, apart = predictor(tied=True), predictor(tied=False)
    exchange = 0.0
    if len(balance) > 1:  # each of the two devices sends half of the gradient, twice
        exchange = 2 * NODE.transfer(WEIGHT / 2)
    found = tied.step(setup).seconds - apart.step(setup).seconds
    assert found == pytest.approx(exchange, abs=1e-12)


def test_a_frozen_parameter_is_counted_once_and_not_exchanged() -> None:
    tied = predictor(tied=True, frozen=True)
    apart = predictor(tied=False, frozen=True)
    (one,), (two,) = memory(tied, 4), memory(apart, 4)
    assert two.parameters - one.parameters == WEIGHT
    assert one.optimizer == two.optimizer
    assert tied.exchange(Setup(8, (2, 2), 4)) == 0


def test_the_plan_of_a_tied_model_fits_where_that_of_two_weights_does_not() -> None:
    options: dict[str, Any] = {"batch_size": 2, "devices": 1, "hardware": NODE, "headroom": 0}
    free = plan(language_model(tied=True), WORDS_OF_TWO, optimizer="adam", **options)
    room = free.best.peak + 1000
    found = plan(language_model(tied=True), WORDS_OF_TWO, optimizer="adam", memory=room, **options)
    assert found.peaks == free.peaks
    with pytest.raises(ValueError, match="need"):
        plan(language_model(tied=False), WORDS_OF_TWO, optimizer="adam", memory=room, **options)
