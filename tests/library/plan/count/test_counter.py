"""Counts of single operators, against counts made by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.hardware.operators import Grid, Operator, flops_of


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def counted(run: Callable[[], object], device: str = "cuda") -> list[Operator]:
    with as_on(device), Counter() as counter:
        run()
    return counter.operators


def backward(y: Tensor) -> None:
    y.backward(torch.empty_like(y))


IMAGES, TABLE = meta(2, 3, 8, 8), meta(1000, 8)
LAST, ROWS = meta(4, 6, grad=True).softmax(1), meta(3, dtype=torch.int64)
LOOKED_UP = 2 * 4 * 3 * 8 + 8 * 3
"""Three rows of the table are read and written, and three row indices are read."""

# A call, and the kind, flops and bytes of each of its operators.
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
    (
        lambda: F.dropout(meta(4, 6), 0.1),
        [("elementwise", 0, 4 * 24 + 4 * 24 + 24)],
    ),  # plus a byte mask
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
    assert [(o.kind, o.flops, o.bytes) for o in counted(run)] == expected


def test_pytorch_has_its_formulas() -> None:
    product = flops_of(torch.ops.aten.mm.default, (meta(2, 3), meta(3, 4)), {}, meta(2, 4))
    assert product == 2 * 2 * 3 * 4, "torch.utils.flop_counter.flop_registry has moved"


MASK = meta(64, 64, dtype=torch.bool)
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


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
    """The device's fused kernel is counted. Its flops are those of the scores that it computes."""
    x = meta(2, 4, 64, 32, dtype=dtype, grad=True)  # samples, heads, tokens, channels
    results: list[Tensor] = []
    operators = counted(
        lambda: results.append(F.scaled_dot_product_attention(x, x, x, **options)), device
    )
    operators += counted(lambda: backward(results[0]), device)
    assert (results[0].shape, results[0].dtype) == (x.shape, dtype)
    assert (kernel or "").removeprefix("_").replace("_", "") in type(
        results[0].grad_fn
    ).__name__.lower()
    found = [o for o in operators if "attention" in o.kind]
    assert [o.kind for o in found] == (["attention", "attention_backward"] if kernel else [])
    assert ("matmul" in [o.kind for o in operators]) == (kernel is None)
    products = 2 * 2 * 4 * 32 * (64 * 65 // 2 if "is_causal" in options else 64 * 64)
    assert [o.flops for o in found] == ([2 * products, 5 * products] if kernel else [])
    assert {o.dtype for o in found} <= {str(dtype).removeprefix("torch.")}
    if kernel == FLASH:
        moved = [
            4 * x.nbytes + 4 * 2 * 4 * 64,
            8 * x.nbytes + 4 * 2 * 4 * 64,
        ]  # plus a log-sum-exp per row
        assert [o.bytes for o in found] == pytest.approx(moved, abs=64)  # plus the RNG state


def test_inside_of_a_function_that_asks_modes_first() -> None:
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True, device="meta"), meta(2, 8, 16)
    operators = counted(lambda: layer(x, x, x, need_weights=False))
    assert [o.kind for o in operators if o.flops] == ["matmul", "attention", "matmul"]


def test_what_the_user_switched_off_is_not_counted() -> None:
    x = meta(2, 4, 64, 32, dtype=torch.float16)
    with sdpa_kernel(SDPBackend.MATH):
        assert "attention" not in [
            o.kind for o in counted(lambda: F.scaled_dot_product_attention(x, x, x))
        ]


@pytest.mark.parametrize(("precision", "dtype"), [("tf32", "tf32"), ("ieee", "float32")])
def test_tf32_as_pytorch_is_set(precision: str, dtype: str) -> None:
    half = meta(8, 8, dtype=torch.float16)
    products = (
        lambda: F.conv2d(IMAGES, meta(8, 3, 3, 3)),
        lambda: meta(8, 8) @ meta(8, 8),
        lambda: half @ half,
    )
    settings: Any = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [each.fp32_precision for each in settings]
    try:
        for each in settings:
            each.fp32_precision = precision
        assert [counted(run)[0].dtype for run in products] == [dtype, dtype, "float16"]
    finally:
        for each, was in zip(settings, before, strict=True):
            each.fp32_precision = was


N, C, K = 2, 8, 16

# A convolution, the size of its images, whether Winograd applies, and whether it is a single matrix product.
OPTIONS: list[tuple[Any, int, dict[str, Any], bool, bool]] = [
    (nn.Conv2d, 6, {"kernel_size": 3, "padding": 1}, True, True),
    (nn.Conv2d, 6, {"kernel_size": 3}, True, True),
    (nn.Conv2d, 6, {"kernel_size": 3, "padding": 2, "bias": True}, True, True),
    (nn.Conv2d, 16, {"kernel_size": 3, "stride": 2}, False, True),
    (nn.Conv2d, 16, {"kernel_size": 5}, False, True),
    (nn.Conv2d, 16, {"kernel_size": 3, "dilation": 2}, False, True),
    (nn.Conv2d, 16, {"kernel_size": 3, "groups": 2}, False, False),
    (nn.ConvTranspose2d, 16, {"kernel_size": 3}, False, False),
    (nn.ConvTranspose2d, 16, {"kernel_size": 3, "groups": 2}, False, False),
]


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("kind, size, options, winograd, plain", OPTIONS)
def test_convolutions(
    kind: Any, size: int, options: dict[str, Any], winograd: bool, plain: bool, needs: bool
) -> None:
    """Each of the two gradients has as many flops as the forward, with its own grid."""
    layer = kind(C, K, **{"bias": False, **options}, device="meta")
    x = torch.empty(N, C, size, size, device="meta", requires_grad=needs)
    with Counter() as counter:
        y = layer(x)
        y.backward(torch.empty_like(y))
    side, out = options["kernel_size"], y.shape[-1]
    weights, groups = side**2 * C * K, options.get("groups", 1)
    grids = [Grid(K, N * out**2), Grid(C, N * size**2), Grid(K, side**2 * C, divisible=True)]
    tiles = [N * math.ceil(edge / 4) ** 2 for edge in (out, size, out)]
    tiled = [Grid(K, tiles[0], 36), Grid(C, tiles[1], 36), Grid(K, C, 36, divisible=True)]

    forward, *gradients = counter.operators
    bias = [gradients.pop()] if "bias" in options else []
    assert [(o.kind, o.flops, o.bytes) for o in bias] == [
        ("elementwise", 0, 4 * N * K * out**2)
    ] * len(bias)
    assert len(gradients) == 1 + needs
    positions = out**2 if kind is nn.Conv2d else size**2
    numbers = N * C * size**2 + N * K * out**2 + weights / groups
    for which, o in zip([0, 1, 2] if needs else [0, 2], (forward, *gradients), strict=True):
        assert o.kind == ("conv3x3" if side == 3 and "stride" not in options else "conv")
        assert o.flops == 2 * N * positions * weights / groups
        assert o.bytes == 4 * (numbers + (K if which == 0 and bias else 0))
        assert o.grid == (grids[which] if plain else None)
        assert [x.kind for x in o.other] == ["winograd"] * (2 * winograd)
        if winograd:
            transformed = 36 * (tiles[which] * (C + K) + C * K)
            assert [x.flops for x in o.other] == [0, 2 * 36 * C * K * tiles[which]]
            assert sum(x.bytes for x in o.other) == 4 * (numbers + 2 * transformed)
            assert o.other[-1].grid == tiled[which]
