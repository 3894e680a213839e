"""A pipeline of any module computes what the module computes on one micro-batch after another."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgpipe import sequential
from torchgpipe.trace.parts import tensors_in

from ..library.traced import BATCHES, CASES, WIDTH, Case, Choosing, rows
from ..plain import piped
from .compare import REORDERED, differences
from .row import total


def parts(value: Any, i: int, chunks: int) -> Any:
    """Return micro-batch `i` of a model's input.

    Tensors without a batch dimension, and masks for all samples, are not split.
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


@pytest.mark.parametrize("name", BATCHES)
def test_other_batch_sizes(name: str, way: dict[str, Any]) -> None:
    """With other batch sizes, traced layers must compute the right results, or raise an error.

    The module is traced in training mode, and its layers run in eval mode.
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
