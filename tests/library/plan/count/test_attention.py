"""Which fused kernel attention is counted as, and what that does; in memory, as a real run on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.count.live import Live
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup

HEADS = (2, 4, 64, 32)
"""Samples, heads, tokens, channels."""
SCORES = 64 * 64
CAUSAL = 64 * 65 // 2
MASK = torch.empty(64, 64, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("device", "dtype", "options", "kernel"),
    [
        ("cuda", torch.bfloat16, {}, "_scaled_dot_product_flash_attention"),
        ("cuda", torch.bfloat16, {"is_causal": True, "dropout_p": 0.1}, "_scaled_dot_product_flash_attention"),
        ("cuda", torch.bfloat16, {"attn_mask": MASK}, "_scaled_dot_product_efficient_attention"),
        ("cuda", torch.float32, {}, "_scaled_dot_product_efficient_attention"),
        ("cuda", torch.float64, {}, None),
        ("cpu", torch.float32, {"attn_mask": MASK}, "_scaled_dot_product_flash_attention_for_cpu"),
        ("cpu", torch.float32, {"dropout_p": 0.1}, None),
        ("meta", torch.bfloat16, {}, None),
    ],
)
def test_the_kernel_of_a_device(device: str, dtype: torch.dtype, options: dict[str, Any], kernel: str | None) -> None:
    x = torch.empty(HEADS, dtype=dtype, device="meta", requires_grad=True)
    with as_on(device), Counter() as counter:
        result = F.scaled_dot_product_attention(x, x, x, **options)
    assert (result.shape, result.dtype) == (x.shape, dtype)
    kinds = [o.kind for o in counter.operators]
    assert ("attention" in kinds, "matmul" in kinds) == (kernel is not None, kernel is None)
    assert (kernel or "").removeprefix("_").replace("_", "") in type(result.grad_fn).__name__.lower()


@pytest.mark.parametrize(("causal", "scores"), [(False, SCORES), (True, CAUSAL)])
def test_work_forward_and_backward(causal: bool, scores: int) -> None:
    x = torch.empty(HEADS, dtype=torch.float16, device="meta", requires_grad=True)
    with as_on("cuda"), Counter() as counter:
        F.scaled_dot_product_attention(x, x, x, is_causal=causal).backward(torch.empty_like(x))
    forward, backward = (o for o in counter.operators if "attention" in o.kind)
    assert (forward.kind, backward.kind) == ("attention", "attention_backward")
    products = 2 * 2 * 4 * scores * 32  # a product for each sample and head
    assert (forward.flops, backward.flops) == (2 * products, 5 * products)
    assert {forward.dtype, backward.dtype} == {"float16"}
    tensor, sums = x.nbytes, 4 * 2 * 4 * 64
    assert forward.bytes == pytest.approx(4 * tensor + sums, abs=64)  # and the state of random numbers
    assert backward.bytes == pytest.approx(8 * tensor + sums, abs=64)


def test_inside_of_a_function_that_asks_modes_first() -> None:
    layer = nn.MultiheadAttention(16, 2, batch_first=True, device="meta")
    x = torch.empty(2, 8, 16, device="meta")
    with as_on("cuda"), Counter() as counter:
        layer(x, x, x, need_weights=False)
    assert [o.kind for o in counter.operators if o.flops] == ["matmul", "attention", "matmul"]


def test_dropout_of_a_gpu_is_one_kernel() -> None:
    with as_on("cuda"), Counter() as counter:
        F.dropout(torch.empty(4, 6, device="meta"), 0.1)
    assert [o.bytes for o in counter.operators] == [4 * 24 + 4 * 24 + 24]


def test_what_the_user_switched_off_is_not_counted() -> None:
    x = torch.empty(HEADS, dtype=torch.float16, device="meta")
    with as_on("cuda"), Counter() as counter, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(x, x, x)
    assert "attention" not in [o.kind for o in counter.operators]


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 0), (torch.bfloat16, 0.01)])
def test_memory_is_that_of_a_real_run(dtype: torch.dtype, off: float) -> None:
    """In bfloat16 a CPU keeps the statistics of norms in bfloat16, too; `meta` and GPUs keep them in float32."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, dtype=dtype)
    x = torch.randn(4, 32, 64, dtype=dtype, requires_grad=True)
    entered = x.clone()
    (footprint,) = count(nn.Sequential(layer), x, device="cpu").footprints(4)
    live = Live()
    live.ignore([*layer.parameters(), entered])
    with live:
        result = layer(entered)
    assert live.peak() == pytest.approx(footprint.graph, rel=off)
    held = sum(change.bytes for change in live.changes)
    saved = {number for number in footprint.saves if number not in footprint.inputs} | set(footprint.outputs)
    assert held == pytest.approx(sum(nbytes for number, nbytes in footprint.sizes if number in saved), rel=off)
    assert result.shape == x.shape  # and lives to here


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_steps_peak_is_within_five_percent_of_a_real_run(autocast: torch.dtype | None) -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)))
    x = torch.randn(8, 64, 64)
    (device,) = setup_memory(count(model, x, device="cpu", autocast=autocast), Setup(8, (4,), 1, "never"))
    live = Live()
    live.ignore([*model.parameters(), x])
    with live:
        with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
            y = model(x)
        y.backward(torch.ones_like(y))
    real = live.peak() + x.nbytes + sum(p.nbytes for p in model.parameters())
    assert device.peak == pytest.approx(real, rel=0.05)
