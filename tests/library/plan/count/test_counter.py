"""Compare the counted flops and bytes of single operators with numbers worked out by hand."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Conv2d, ConvTranspose2d, MultiheadAttention
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.hardware.operators import Grid, Operator, bytes_of, flops_of


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def counted(run: Callable[[], object], device: str = "cuda") -> list[Operator]:
    with as_on(device), Counter() as counter:
        run()
    return counter.operators


def kinds_of(operators: Sequence[Operator]) -> list[str]:
    return [operator.kind for operator in operators]


def backward(y: Tensor) -> None:
    y.backward(torch.empty_like(y))


IMAGES = meta(2, 3, 8, 8)
TABLE = meta(1000, 8)
LAST = meta(4, 6, grad=True).softmax(1)
ROWS = meta(3, dtype=torch.int64)
LOOKED_UP = 2 * 4 * 3 * 8 + 8 * 3
"""Three rows of the table are read and written, and three row indices are read."""
WITH_BYTE_MASK = 4 * 24 + 4 * 24 + 24

# Each row has a call, and for each of its operators the kind, the flops and the bytes.
OPERATORS: list[tuple[Callable[[], object], list[tuple[str, float, float]]]] = [
    (
        lambda: F.linear(meta(5, 8), meta(16, 8), meta(16)),
        [("matmul", 2 * 5 * 8 * 16, 4 * (40 + 128 + 16 + 80))],
    ),
    (lambda: F.batch_norm(IMAGES, None, None, training=True), [("norm", 0, 4 * (3 * 384 + 2 * 3))]),
    (lambda: LAST.detach().softmax(1), [("norm", 0, 4 * 3 * 24)]),
    (lambda: backward(LAST), [("norm", 0, 4 * (2 + 2 + 1) * 24)]),
    (lambda: F.avg_pool2d(IMAGES, 2), [("pool", 0, 4 * (384 + 96))]),
    (lambda: F.interpolate(IMAGES, scale_factor=2.0), [("pool", 0, 4 * (384 + 4 * 384))]),
    (lambda: meta(2, 3).relu(), [("elementwise", 0, 4 * 2 * 6)]),
    (lambda: meta(4, 6).view(24).unsqueeze(0).t().detach(), []),
    (lambda: meta(4, 6) + meta(6), [("elementwise", 0, 4 * (24 + 6 + 24))]),
    (lambda: F.dropout(meta(4, 6), 0.1), [("elementwise", 0, WITH_BYTE_MASK)]),
    (lambda: F.embedding(ROWS, TABLE), [("elementwise", 0, LOOKED_UP)]),
    (lambda: TABLE.index_select(0, ROWS), [("elementwise", 0, LOOKED_UP)]),
    (lambda: TABLE[ROWS], [("elementwise", 0, LOOKED_UP)]),
    (lambda: TABLE.gather(0, ROWS.reshape(1, 3)), [("elementwise", 0, 2 * 4 * 3 + 8 * 3)]),
    (
        lambda: ROWS.index_select(0, meta(9, dtype=torch.int64)),
        [("elementwise", 0, 8 * (3 + 9 + 9))],
    ),
    (lambda: meta(4, 6).fill_(1), [("elementwise", 0, 4 * 24)]),
    (lambda: meta(4, 6).zero_(), [("elementwise", 0, 4 * 24)]),
    (lambda: meta(4, 6).copy_(meta(6)), [("elementwise", 0, 4 * (6 + 24))]),
    (lambda: meta(4, 6).add_(1), [("elementwise", 0, 2 * 4 * 24)]),
]


@pytest.mark.parametrize(("run", "expected"), OPERATORS)
def test_operators(run: Callable[[], object], expected: list[tuple[str, float, float]]) -> None:
    found = [(operator.kind, operator.flops, operator.bytes) for operator in counted(run)]
    assert found == expected


def test_bytes_of_expanded_and_sparse_tensors() -> None:
    """Check that expanded dimensions take no bytes, and that sparse tensors count as 0 bytes."""
    assert bytes_of(torch.zeros(1, 4).expand(3, 4)) == 4 * 4
    assert bytes_of(torch.eye(3).to_sparse()) == 0
    assert bytes_of(torch.eye(3).to_mkldnn()) == 0


def test_pytorch_has_its_formulas() -> None:
    factors = (meta(2, 3), meta(3, 4))
    product = flops_of(torch.ops.aten.mm.default, factors, {}, meta(2, 4))
    assert product == 2 * 2 * 3 * 4, "torch.utils.flop_counter.flop_registry has moved"


MASK = meta(64, 64, dtype=torch.bool)
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("device", "dtype", "options", "kernel"),
    [
        ("cuda", torch.bfloat16, {}, FLASH),
        ("cuda", torch.bfloat16, {"is_causal": True, "dropout_p": 0.1}, FLASH),
        ("cuda", torch.bfloat16, {"attn_mask": MASK}, EFFICIENT),
        ("cuda", torch.float32, {}, EFFICIENT),
        ("cuda", torch.float64, {}, None),
        ("cpu", torch.float32, {"attn_mask": MASK}, f"{FLASH}_for_cpu"),
        ("cpu", torch.float32, {"dropout_p": 0.1}, None),
    ],
)
def test_attention(
    device: str, dtype: torch.dtype, options: dict[str, Any], kernel: str | None
) -> None:
    """Check that the count contains the fused attention kernel that the device would run.

    The flops and bytes of this kernel are compared with numbers worked out by hand.
    """
    samples, heads, tokens, channels = 2, 4, 64, 32
    x = meta(samples, heads, tokens, channels, dtype=dtype, grad=True)
    results: list[Tensor] = []

    def forward() -> None:
        results.append(F.scaled_dot_product_attention(x, x, x, **options))

    operators = counted(forward, device)
    (result,) = results
    operators += counted(lambda: backward(result), device)

    assert result.shape == x.shape
    assert result.dtype == dtype
    node = type(result.grad_fn).__name__.lower()
    kernel_in_node = (kernel or "").removeprefix("_").replace("_", "")
    assert kernel_in_node in node
    assert ("matmul" in kinds_of(operators)) == (kernel is None)
    found = [o for o in operators if "attention" in o.kind]
    if kernel is None:
        assert found == []
        return
    assert kinds_of(found) == ["attention", "attention_backward"]
    of_forward, of_backward = found
    scores = tokens * tokens
    if "is_causal" in options:
        scores = tokens * (tokens + 1) // 2
    product = 2 * samples * heads * channels * scores
    assert of_forward.flops == 2 * product
    assert of_backward.flops == 5 * product
    dtype_name = str(dtype).removeprefix("torch.")
    assert of_forward.dtype == dtype_name
    assert of_backward.dtype == dtype_name
    if kernel == FLASH:
        log_sums = 4 * samples * heads * tokens
        # The kernel also reads and writes the state of the random number generator.
        assert of_forward.bytes == pytest.approx(4 * x.nbytes + log_sums, abs=64)
        assert of_backward.bytes == pytest.approx(8 * x.nbytes + log_sums, abs=64)


def test_inside_of_a_function_that_asks_modes_first() -> None:
    layer = MultiheadAttention(16, 2, batch_first=True, device="meta")
    x = meta(2, 8, 16)
    operators = counted(lambda: layer(x, x, x, need_weights=False))
    with_flops = [operator for operator in operators if operator.flops]
    assert kinds_of(with_flops) == ["matmul", "attention", "matmul"]


def test_what_the_user_switched_off_is_not_counted() -> None:
    x = meta(2, 4, 64, 32, dtype=torch.float16)
    with sdpa_kernel(SDPBackend.MATH):
        operators = counted(lambda: F.scaled_dot_product_attention(x, x, x))
    assert "attention" not in kinds_of(operators)


@pytest.mark.parametrize(("precision", "dtype"), [("tf32", "tf32"), ("ieee", "float32")])
def test_tf32_as_pytorch_is_set(precision: str, dtype: str) -> None:
    half = meta(8, 8, dtype=torch.float16)
    products = (
        lambda: F.conv2d(IMAGES, meta(8, 3, 3, 3)),
        lambda: meta(8, 8) @ meta(8, 8),
        lambda: half @ half,
    )
    matmul: Any = torch.backends.cuda.matmul
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    settings = (matmul, conv)
    before = [each.fp32_precision for each in settings]
    try:
        for each in settings:
            each.fp32_precision = precision
        found = [counted(run)[0].dtype for run in products]
    finally:
        for each, was in zip(settings, before, strict=True):
            each.fp32_precision = was
    assert found == [dtype, dtype, "float16"]


def test_products_are_those_with_a_trained_weight() -> None:
    """Check which products have a backward that a schedule can split: those with a trained weight.

    Frozen weights, as with LoRA, and products of activations, as in attention, do not count.
    """
    frozen, trained = meta(8, 8), meta(8, 8, grad=True)
    x = meta(4, 8, grad=True)
    with as_on("cuda"), Counter([trained]) as counter:
        y = F.linear(x, frozen, trained[0])
        y = F.linear(y, trained)
        y = y @ trained.to(torch.float16).float()
        y = y @ y.t() @ y
    products = [operator.flops for operator in counter.products]
    assert products == [2 * 4 * 8 * 8] * 2

    # Positions that are added, and a mask of the weight, as in pruning, change nothing.
    mask = meta(8, 8)
    with as_on("cuda"), Counter([trained], [mask]) as counter_of_sum:
        y = F.linear(x + trained[:4], trained * mask)
        F.linear((y * trained[0] + trained[1]).relu(), trained / trained.square().sum().sqrt())
    assert len(counter_of_sum.products) == 2
    assert len([operator for operator in counter.operators if operator.flops]) == 5


N, C, K = 2, 8, 16

# Each row has the type of a convolution, the height and width of its images, its options, whether
# Winograd's algorithm applies to it, and whether it is one matrix product.
OPTIONS: list[tuple[Any, int, dict[str, Any], bool, bool]] = [
    (Conv2d, 6, {"kernel_size": 3, "padding": 1}, True, True),
    (Conv2d, 6, {"kernel_size": 3}, True, True),
    (Conv2d, 6, {"kernel_size": 3, "padding": 2, "bias": True}, True, True),
    (Conv2d, 16, {"kernel_size": 3, "stride": 2}, False, True),
    (Conv2d, 16, {"kernel_size": 5}, False, True),
    (Conv2d, 16, {"kernel_size": 3, "dilation": 2}, False, True),
    (Conv2d, 16, {"kernel_size": 3, "groups": 2}, False, False),
    (ConvTranspose2d, 16, {"kernel_size": 3}, False, False),
    (ConvTranspose2d, 16, {"kernel_size": 3, "groups": 2}, False, False),
]


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("kind, size, options, winograd, plain", OPTIONS)
def test_convolutions(
    kind: Any, size: int, options: dict[str, Any], winograd: bool, plain: bool, needs: bool
) -> None:
    """Check the counted flops of convolutions, and the sizes of their matrix products.

    The forward, the gradient of the input, and the gradient of the weight count as one matrix
    product each.
    """
    layer = kind(C, K, **{"bias": False, **options}, device="meta")
    x = torch.empty(N, C, size, size, device="meta", requires_grad=needs)

    with Counter() as counter:
        y = layer(x)
        y.backward(torch.empty_like(y))

    side = options["kernel_size"]
    groups = options.get("groups", 1)
    out = y.shape[-1]
    weights = side**2 * C * K
    # The grids of the forward, of the input's gradient and of the weight's gradient.
    grids = [Grid(K, N * out**2), Grid(C, N * size**2), Grid(K, side**2 * C, divisible=True)]
    tiles = [N * math.ceil(edge / 4) ** 2 for edge in (out, size, out)]
    tiled = [Grid(K, tiles[0], 36), Grid(C, tiles[1], 36), Grid(K, C, 36, divisible=True)]

    forward, *gradients = counter.operators
    with_bias = "bias" in options
    if with_bias:
        bias = gradients.pop()
        assert (bias.kind, bias.flops) == ("elementwise", 0)
        assert bias.bytes == 4 * N * K * out**2
    found = {0: forward, 2: gradients[-1]}
    if needs:
        found[1] = gradients[0]
    assert len(gradients) == len(found) - 1

    positions = out**2 if kind is Conv2d else size**2
    numbers = N * C * size**2 + N * K * out**2 + weights / groups
    plain_3x3 = side == 3 and "stride" not in options
    for which, o in found.items():
        assert o.kind == ("conv3x3" if plain_3x3 else "conv")
        assert o.flops == 2 * N * positions * weights / groups
        bias_numbers = K if which == 0 and with_bias else 0
        assert o.bytes == 4 * (numbers + bias_numbers)
        assert o.grid == (grids[which] if plain else None)
        if not winograd:
            assert len(o.other) == 0
            continue
        assert kinds_of(o.other) == ["winograd", "winograd"]
        transform, product = o.other
        assert transform.flops == 0
        assert product.flops == 2 * 36 * C * K * tiles[which]
        transformed = 36 * (tiles[which] * (C + K) + C * K)
        assert transform.bytes + product.bytes == 4 * (numbers + 2 * transformed)
        assert product.grid == tiled[which]
