"""A pipeline of any module computes what the module computes on each micro-batch in turn."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgpipe import sequential
from torchgpipe.trace.parts import tensors_in

from ..library.traced import BATCHES, CASES, WIDTH, Case, Choosing, Unusual, rows
from ..plain import piped
from .compare import REORDERED, differences
from .row import total


def parts(value: Any, i: int, chunks: int) -> Any:
    """Return micro-batch `i` of a sample. Tensors without a batch dimension, and shared masks, stay whole."""
    if isinstance(value, dict):
        return {
            key: x if key == "mask" and x.dim() < 2 else parts(x, i, chunks)
            for key, x in value.items()
        }
    if isinstance(value, tuple):
        first, *masks = value
        return (parts(first, i, chunks), *masks)
    return value.chunk(chunks)[i] if isinstance(value, Tensor) else value


def called(model: Any, sample: Any) -> Any:
    if isinstance(sample, dict):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_model(case: Case, n: int, chunks: int, way: dict[str, Any]) -> None:
    module, sample = case.make(), case.sample()
    plain = copy.deepcopy(module)
    layers = sequential(module, sample, **case.options)
    n = min(n, len(layers))
    balance = [len(layers) - n + 1] + [1] * (n - 1)
    try:
        model = piped(layers, balance, chunks, **way)
    except ValueError as error:
        assert (
            way["engine"] == "ranks" and case.make is Unusual and "are one parameter" in str(error)
        )
        return
    outputs = called(model, sample)
    expected = [called(plain, parts(sample, i, chunks)) for i in range(chunks)]
    joined = tuple(
        torch.cat(column) for column in zip(*map(tuple, map(tensors_in, expected)), strict=True)
    )
    found = tuple(tensors_in(outputs))
    assert type(outputs) is type(expected[0])
    for y in (found, joined):
        total(y).backward()
    assert differences((found, module), (joined, plain), REORDERED) == []
    assert dict(model.named_parameters()).keys() == dict(module.named_parameters()).keys()


@pytest.mark.parametrize("name", BATCHES)
def test_other_batch_sizes(name: str, way: dict[str, Any]) -> None:
    """Layers are right for a batch size, or refuse it; traced in training, they are used in evaluation."""
    make, right, refused = BATCHES[name]
    module = make()
    layers = sequential(module, rows(), whole=[Choosing] if "contents" in name else [])
    model = piped(layers, [1] * (len(layers) > 1) + [max(1, len(layers) - 1)], 2, **way).eval()
    module.eval()
    for size in (*right, *refused, *right):
        x = torch.randn(2 * size, WIDTH)
        if size in refused:
            with pytest.raises(
                (TypeError, RuntimeError),
                match=rf"2, 3, 5, {size} .*samples it does not do the same|asks for",
            ):
                model(x)
        else:
            assert differences(model(x), torch.cat([*map(module, x.chunk(2))]), 0.0) == []
