"""What is counted under autocast: operators in the types that autocast gives them, with their casts."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.autocast import FULL, LOWER
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.counter import Counter

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "softmax": lambda x: x.softmax(0),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "loss": lambda x: F.mse_loss(x, x),
    "gelu": lambda x: F.gelu(x),
    "sum of two types": lambda x: x @ x + x,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_types_are_those_of_a_real_run(name: str) -> None:
    x = torch.ones(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        real = OPERATORS[name](x)
    with as_on("cpu", torch.bfloat16):
        counted = OPERATORS[name](x.to("meta"))
    assert counted.dtype is real.dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("linear", torch.float16),
        ("einsum", torch.float16),
        ("attention", torch.float16),
        ("softmax", torch.float32),
        ("layer norm", torch.float32),
        ("loss", torch.float32),
        ("gelu", torch.float16),
        ("sum of two types", torch.float32),
    ],
)
def test_types_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    x = torch.empty(8, 8, device="meta", dtype=torch.float16 if name in ("gelu", "softmax") else torch.float32)
    with as_on("cuda", torch.float16):
        assert OPERATORS[name](x).dtype is dtype


def _first(rows: Any) -> set[str]:
    return {row.elts[0].value for row in rows}


def test_lists_are_those_of_pytorch() -> None:
    """PyTorch's own tests have the lists; they are read, since what they import is not everywhere."""
    folder = Path(torch.__file__).parent / "testing" / "_internal"
    listed: dict[str, dict[str, set[str]]] = {}
    for test in ast.walk(ast.parse((folder / "autocast_test_lists.py").read_text())):
        if isinstance(test, ast.ClassDef):
            listed[test.name] = {
                part.targets[0].attr: _first(part.value.elts)
                for part in ast.walk(test)
                if isinstance(part, ast.Assign)
                and isinstance(part.targets[0], ast.Attribute)
                and isinstance(part.value, ast.List)
                and all(isinstance(row, ast.Tuple) for row in part.value.elts)
            }
    cuda, cpu = listed["AutocastTestLists"], listed["AutocastCPUTestLists"]
    expected = [
        (LOWER["cuda"], cuda["torch_fp16"] | cuda["nn_fp16"] | cuda["linalg_fp16"] | cuda["methods_fp16"]),
        (FULL["cuda"], cuda["torch_fp32"] | cuda["nn_fp32"] | cuda["methods_fp32"]),
        (LOWER["cpu"], cpu["torch_16"] | cpu["nn_16"]),
        (FULL["cpu"], cpu["torch_fp32"] | cpu["nn_fp32"]),
    ]
    behind_others = {"cudnn_convolution", "cudnn_convolution_transpose"}
    for ours, theirs in expected:
        public = {name for name in theirs if not name.startswith("_") or name.startswith("__")}
        assert public - ours <= behind_others, "autocast's lists have changed"


def test_casts_are_counted_and_weights_stay_in_float32() -> None:
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    (layer,) = count(nn.Sequential(nn.Linear(8, 16, bias=False, device="meta")), x, autocast=torch.bfloat16).at(4)
    casts = [(o.dtype, o.bytes) for o in layer.forward if o.kind == "elementwise"]
    assert casts == [("bfloat16", 6.0 * 4 * 8), ("bfloat16", 6.0 * 8 * 16)]
    assert {o.dtype for o in (*layer.forward, *layer.backward) if o.kind == "matmul"} == {"bfloat16"}
    assert layer.parameters == 4 * 8 * 16
    assert ("float32", 6.0 * 8 * 16) in [(o.dtype, o.bytes) for o in layer.backward], "the weight's gradient, cast back"


def test_it_is_off_again_and_follows_what_layers_switch_off() -> None:
    class Island(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", enabled=False):
                return x @ x

    x = torch.empty(8, 8, device="meta")
    with as_on("cuda", torch.bfloat16):
        assert Island()(x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")
    with as_on("cuda"):
        assert (x @ x).dtype is torch.float32


@pytest.fixture
def settings() -> Iterator[tuple[Any, Any]]:
    """Give what PyTorch is set to compute products and convolutions in, and set it back."""
    both = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [each.fp32_precision for each in both]
    yield both
    for each, precision in zip(both, before, strict=True):
        each.fp32_precision = precision


@pytest.mark.parametrize(("precision", "dtype"), [("tf32", "tf32"), ("ieee", "float32")])
def test_tf32_as_pytorch_is_set(settings: tuple[Any, Any], precision: str, dtype: str) -> None:
    for setting in settings:
        setting.fp32_precision = precision
    image, matrix = torch.empty(1, 8, 8, 8, device="meta"), torch.empty(8, 8, device="meta")
    with Counter() as counter:
        F.conv2d(image, torch.empty(8, 8, 3, 3, device="meta"))
        matrix @ matrix
        matrix.half() @ matrix.half()
    assert [o.dtype for o in counter.operators if o.flops] == [dtype, dtype, "float16"]
