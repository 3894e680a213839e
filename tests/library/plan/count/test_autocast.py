"""Test that the count of operators under autocast has the dtypes and casts of autocast."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.plan.count.as_on import FULL, LOWER, as_on
from torchgpipe.plan.count.count import count

FLOAT32, FLOAT16, DOUBLE = torch.float32, torch.float16, torch.float64


def attention(x: Tensor) -> Tensor:
    tokens = x[None, None]  # one sample and one head
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


# Each value has an operator, the dtype of its input, and the dtype that its output has on a GPU
# under autocast to float16.
OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, torch.dtype]] = {
    "linear": (lambda x: F.linear(x, x), FLOAT32, FLOAT16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), FLOAT32, FLOAT16),
    "attention": (attention, FLOAT32, FLOAT16),
    "softmax": (lambda x: x.softmax(0), FLOAT16, FLOAT32),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), FLOAT16, FLOAT32),
    "gelu": (F.gelu, FLOAT16, FLOAT16),
    "sum of two types": (lambda x: x @ x + x, FLOAT32, FLOAT32),
    "double": (lambda x: x @ x, DOUBLE, DOUBLE),
}


@pytest.mark.parametrize(("run", "given", "on_gpu"), OPERATORS.values(), ids=OPERATORS)
def test_types(run: Callable[[Tensor], Tensor], given: torch.dtype, on_gpu: torch.dtype) -> None:
    """Check that the dtypes of counted operators' outputs are the real dtypes.

    For the CPU, the real dtypes come from a run. For a GPU, they are listed in `OPERATORS`.
    """
    x = torch.ones(8, 8, dtype=given)
    on_meta = x.to("meta")
    with torch.autocast("cpu", torch.bfloat16):
        real = run(x)
    with as_on("cpu", torch.bfloat16):
        counted_on_cpu = run(on_meta)
    with as_on("cuda", torch.float16):
        counted_on_gpu = run(on_meta)
    assert counted_on_cpu.dtype is real.dtype
    assert counted_on_gpu.dtype is on_gpu


LIST = re.compile(r"^        self\.(\w+) = \[\n(.*?)^        \]", re.MULTILINE | re.DOTALL)
NAME = re.compile(r'^ +\("(\w+)"', re.MULTILINE)


def names_in(source: str, *lists: str) -> set[str]:
    """Return the names of the operators in some lists of a source file.

    Args:
        source: The text of the file.
        lists: The names of the lists in that file.
    """
    names: set[str] = set()
    for list_name, rows in LIST.findall(source):
        if list_name in lists:
            names.update(NAME.findall(rows))
    return names


def test_lists_are_those_of_pytorch() -> None:
    """Check that the library's lists of autocast operators are those of PyTorch's own tests.

    The test reads PyTorch's file as text, because an import could fail: some of the modules that
    this file imports may not be installed.
    """
    file = Path(torch.__file__).parent / "testing" / "_internal" / "autocast_test_lists.py"
    cuda, cpu = file.read_text().split("class AutocastCPUTestLists")
    expected = [
        (LOWER["cuda"], names_in(cuda, "torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16")),
        (FULL["cuda"], names_in(cuda, "torch_fp32", "nn_fp32", "methods_fp32")),
        (LOWER["cpu"], names_in(cpu, "torch_16", "nn_16")),
        (FULL["cpu"], names_in(cpu, "torch_fp32", "nn_fp32")),
    ]
    behind_other_operators = {"cudnn_convolution", "cudnn_convolution_transpose"}
    for ours, theirs in expected:
        assert theirs, "a list has another name"
        public = {name for name in theirs if not name.startswith("_") or name.startswith("__")}
        assert public - ours <= behind_other_operators, "autocast's lists have changed"


def test_casts_are_counted_and_weights_stay_in_float32() -> None:
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    linear = nn.Linear(8, 16, bias=False, device="meta")
    counts = count(nn.Sequential(linear), x, autocast=torch.bfloat16)

    (layer,) = counts.at(4)

    casts = [(o.dtype, o.bytes) for o in layer.forward if o.kind == "elementwise"]
    assert casts == [("bfloat16", 6.0 * 4 * 8), ("bfloat16", 6.0 * 8 * 16)]
    of_products = set()
    for operator in (*layer.forward, *layer.backward):
        if operator.kind == "matmul":
            of_products.add(operator.dtype)
    assert of_products == {"bfloat16"}
    assert layer.parameters == 4 * 8 * 16
    in_backward = [(o.dtype, o.bytes) for o in layer.backward]
    assert ("float32", 6.0 * 8 * 16) in in_backward, "the weight's gradient, cast back"


def test_it_is_off_again_and_follows_what_layers_switch_off() -> None:
    x = torch.empty(8, 8, device="meta")
    with as_on("cuda", torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")
    with as_on("cuda"):
        assert (x @ x).dtype is torch.float32
