"""`pipeline`: a module in, a planned pipeline out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchgpipe import pipeline
from torchgpipe.trace.parts import tensors_in

from ..traced import CASES, Case


@pytest.mark.parametrize("hardware", ["p40x8", "here"])
@pytest.mark.parametrize("name", ["in place, with views", "by keyword, a mask of one sample", "dictionaries"])
def test_planned(name: str, hardware: str) -> None:
    case: Case = CASES[name]
    module, sample = case.make().eval(), case.sample()
    model: Any = pipeline(module, sample, devices=["cpu"] * 3, batch_size=6, chunks=2, memory="1GiB", hardware=hardware)
    assert 1 <= len(model.partitions) <= 3
    assert model.chunks == 2
    called = (lambda run: run(**sample)) if isinstance(sample, dict) else (lambda run: run(sample))
    called = (lambda run: run(*sample)) if isinstance(sample, tuple) else called
    torch.testing.assert_close([*tensors_in(called(model))], [*tensors_in(called(module))])
