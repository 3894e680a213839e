"""Counts under autocast: operators have the dtypes that autocast chooses, and casts are counted."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.plan.count.as_on import FULL, LOWER, as_on
from torchgpipe.plan.count.count import count

attention: Any = F.scaled_dot_product_attention
# An operator on tensors of a dtype, and the dtype in which a GPU runs it under autocast to float16.
OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, torch.dtype]] = {
    "linear": (lambda x: F.linear(x, x), torch.float32, torch.float16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), torch.float32, torch.float16),
    "attention": (lambda x: attention(*[x[None, None]] * 3), torch.float32, torch.float16),
    "softmax": (lambda x: x.softmax(0), torch.float16, torch.float32),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), torch.float16, torch.float32),
    "gelu": (lambda x: F.gelu(x), torch.float16, torch.float16),
    "sum of two types": (lambda x: x @ x + x, torch.float32, torch.float32),
    "double": (lambda x: x @ x, torch.float64, torch.float64),
}


@pytest.mark.parametrize(("run", "given", "on_gpu"), OPERATORS.values(), ids=OPERATORS)
def test_types(run: Callable[[Tensor], Tensor], given: torch.dtype, on_gpu: torch.dtype) -> None:
    """On a CPU the counted operators are those of a real run."""
    x = torch.ones(8, 8, dtype=given)
    with torch.autocast("cpu", torch.bfloat16):
        real = run(x)
    with as_on("cpu", torch.bfloat16):
        assert run(x.to("meta")).dtype is real.dtype
    with as_on("cuda", torch.float16):
        assert run(x.to("meta")).dtype is on_gpu


LIST = r"^        self\.(\w+) = \[\n(.*?)^        \]"


def test_lists_are_those_of_pytorch() -> None:
    """PyTorch's own tests have the lists. They are parsed, not imported: their imports are not always installed."""
    file = Path(torch.__file__).parent / "testing" / "_internal" / "autocast_test_lists.py"
    cuda, cpu = (
        {
            name: {*re.findall(r'^ +\("(\w+)"', rows, re.M)}
            for name, rows in re.findall(LIST, part, re.M | re.S)
        }
        for part in file.read_text().split("class AutocastCPUTestLists")
    )
    expected = [
        (
            LOWER["cuda"],
            cuda["torch_fp16"] | cuda["nn_fp16"] | cuda["linalg_fp16"] | cuda["methods_fp16"],
        ),
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
    (layer,) = count(
        nn.Sequential(nn.Linear(8, 16, bias=False, device="meta")), x, autocast=torch.bfloat16
    ).at(4)
    casts = [(o.dtype, o.bytes) for o in layer.forward if o.kind == "elementwise"]
    assert casts == [("bfloat16", 6.0 * 4 * 8), ("bfloat16", 6.0 * 8 * 16)]
    assert {o.dtype for o in (*layer.forward, *layer.backward) if o.kind == "matmul"} == {
        "bfloat16"
    }
    assert layer.parameters == 4 * 8 * 16
    assert ("float32", 6.0 * 8 * 16) in [(o.dtype, o.bytes) for o in layer.backward], (
        "the weight's gradient, cast back"
    )


def test_it_is_off_again_and_follows_what_layers_switch_off() -> None:
    x = torch.empty(8, 8, device="meta")
    with as_on("cuda", torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")
    with as_on("cuda"):
        assert (x @ x).dtype is torch.float32
