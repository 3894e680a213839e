"""Tests that a pipeline of any traced module computes what the module itself computes."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchgpipe import sequential
from torchgpipe.schedules.named import NAMED
from torchgpipe.trace.parts import tensors_in

from ..library.trace.test_kept import Encoder, Reader, sentences
from ..library.trace.texts import GPT, SHAPES, Long, generated, text
from ..library.traced import BATCHES, CASES, WIDTH, Case, Choosing, rows
from ..plain import TWICE, piped
from .compare import REORDERED, differences
from .row import total


def parts(value: Any, i: int, chunks: int) -> Any:
    """Return micro-batch `i` of a model's input, which can be a dictionary or a tuple of tensors.

    A mask that all samples share is not split, but is in each micro-batch.
    """
    if isinstance(value, dict):
        found = {}
        for key, x in value.items():
            shared = key == "mask" and x.dim() < 2
            found[key] = x if shared else parts(x, i, chunks)
        return found
    if isinstance(value, tuple):
        first, *masks = value
        return (parts(first, i, chunks), *masks)
    return value.chunk(chunks)[i] if isinstance(value, Tensor) else value


def called(model: Any, sample: Any) -> Any:
    if isinstance(sample, dict):
        return model(**sample)
    if isinstance(sample, tuple):
        return model(*sample)
    return model(sample)


def joined(outputs: list[Any]) -> tuple[Tensor, ...]:
    """Concatenate the outputs of all micro-batches."""
    columns = zip(*map(tensors_in, outputs), strict=True)
    return tuple(torch.cat(column) for column in columns)


@pytest.mark.quick(16)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_model(case: Case, n: int, chunks: int, way: dict[str, Any]) -> None:
    module, sample = case.make(), case.sample()
    plain = copy.deepcopy(module)
    layers = sequential(module, sample, **case.options)
    n = min(n, len(layers))
    balance = [len(layers) - n + 1] + [1] * (n - 1)
    model = piped(layers, balance, chunks, **way)
    outputs = called(model, sample)
    expected = [called(plain, parts(sample, i, chunks)) for i in range(chunks)]
    assert type(outputs) is type(expected[0])
    ours, theirs = tuple(tensors_in(outputs)), joined(expected)
    total(ours).backward()
    total(theirs).backward()
    assert differences((ours, module), (theirs, plain), REORDERED) == []
    assert dict(model.named_parameters()).keys() == dict(module.named_parameters()).keys()


@pytest.mark.quick(8)
@pytest.mark.filterwarnings("ignore:.* makes other calls when it is not in training")
@pytest.mark.parametrize("name", BATCHES)
def test_other_batch_sizes(name: str, way: dict[str, Any]) -> None:
    """Check layers with other batch sizes than that of the sample that the module was traced with.

    They must compute the right results, or raise an error.
    """
    make, right, refused = BATCHES[name]
    module = make()
    layers = sequential(module, rows(), whole=[Choosing] if "contents" in name else [])
    count = len(layers)
    balance = [1, count - 1] if count > 1 else [1]
    model = piped(layers, balance, 2, **way).eval()
    module.eval()
    for size in (*right, *refused, *right):
        x = torch.randn(2 * size, WIDTH)
        if size in refused:
            message = rf"2, 3, 5, {size} .*samples it does not do the same|asks for"
            with pytest.raises((TypeError, RuntimeError), match=message):
                model(x)
        else:
            expected = torch.cat([module(part) for part in x.chunk(2)])
            assert differences(model(x), expected, 0.0) == []


@cache
def _language_model(kind: Any) -> tuple[nn.Sequential, GPT]:
    module = kind(blocks=1)
    return sequential(module, text(2, 8), dynamic_shapes=SHAPES), module


def language_model(kind: Any) -> tuple[nn.Sequential, GPT]:
    """Return the layers of a traced language model, and the module itself.

    Tracing is slow, so the module is traced once, and each call returns copies.
    """
    return copy.deepcopy(_language_model(kind))


@pytest.mark.quick(8)
@pytest.mark.parametrize("schedule", [*NAMED, ""])
def test_other_lengths(schedule: str, way: dict[str, Any]) -> None:
    """Check that a pipeline which trains on texts of two lengths has the module's gradients.

    If `schedule` is empty, the test calls `model(x)` and `backward()` instead of `model.step`.
    """
    layers, module = language_model(GPT if schedule else Long)
    plain = copy.deepcopy(module)
    twice = schedule in TWICE
    balance = [1, 2, 2, 1] if twice else [3, 3]
    options: dict[str, Any] = {"v": 2 if twice else 1}
    if schedule:
        options["schedule"] = schedule
    model = piped(layers, balance, 2, **way, **options)
    for length in (5, 9):
        x = text(4, length)
        target = torch.randn(4, length, 11)
        for part, part_target in zip(x.chunk(2), target.chunk(2), strict=True):
            (mse_loss(plain(part), part_target) / 2).backward()
        if schedule:
            model.step(mse_loss, x, target)
        else:
            mse_loss(model(x), target).backward()
    assert differences(module, plain, REORDERED) == []
    if not schedule:
        for _ in range(2):
            with pytest.raises((TypeError, RuntimeError), match="2x10 samples x lengths it does"):
                model(text(4, 10))
        x = text(4, 7)
        assert differences(model(x), torch.cat([plain(x[:2]), plain(x[2:])]), 0.0) == []


def test_generation(way: dict[str, Any]) -> None:
    layers, module = language_model(GPT)
    model = piped(layers, [3, 3], 2, **way).eval()
    given = text(2, 3)
    with torch.no_grad():
        assert torch.equal(generated(model, given, 6), generated(module.eval(), given, 6))


class DeepReader(Reader):
    """A module with an LSTM over packed sequences, and enough layers for four partitions."""

    def __init__(self) -> None:
        super().__init__(Encoder())
        self.more = nn.Linear(3, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = self.more(super().forward(words, lengths))
        return result


@cache
def _reader() -> tuple[nn.Sequential, DeepReader]:
    module = DeepReader()
    return sequential(module, sentences(4), whole=[Encoder]), module


@pytest.mark.quick(4)
@pytest.mark.parametrize("schedule", NAMED)
def test_packed_sequences_in_a_layer_that_is_kept_whole(schedule: str, way: dict[str, Any]) -> None:
    """Check that a module with a layer for packed sequences can be traced and trained.

    The option `whole` keeps this layer from being traced. The library must not run the layer on
    zeros in place of real inputs, because an LSTM raises an error for a sequence of length zero.
    """
    layers, module = copy.deepcopy(_reader())
    plain = copy.deepcopy(module)
    balance, v = ([1, 1, 1, 1], 2) if schedule in TWICE else ([1, 3], 1)
    model = piped(layers, balance, 2, schedule=schedule, v=v, **way)
    words, lengths = sentences(6)
    target = torch.randn(6, 3)
    expected = torch.cat([plain(words[:3], lengths[:3]), plain(words[3:], lengths[3:])])
    mse_loss(expected, target).backward()
    model.step(mse_loss, (words, lengths), target)
    assert differences(module, plain, REORDERED) == []
    found = model.predict((words, lengths))
    assert differences(found, expected.detach(), REORDERED) == []
