"""How much of its peak each GPU reaches in single kernels, as others timed them."""

from __future__ import annotations

__all__ = ["COMPUTE", "MEMORY"]

MLI = "mli/transformers-benchmarks, README: {}, timed in PyTorch"
FLASH = (
    "Dao-AILab/flash-attention, pull request 1791 on GitHub: FlashAttention-2 on an H100, 8,192 tokens, heads of 128 "
    "channels; "
)
NO_FLASH = "assumed, not measured: as matmul; there are no flash kernels for it, and the others are slower"

COMPUTE: dict[str, dict[str, tuple[float, str]]] = {
    "v100x8": {
        "matmul": (0.76, MLI.format("V100 16 GB, matrices of 8,192 x 8,192 in float16 at 95 TFLOP/s of 125")),
        "matmul.float32": (0.892, MLI.format("V100 16 GB, matrices of 8,192 x 8,192 in float32 at 14 TFLOP/s of 15.7")),
        "attention": (0.76, NO_FLASH),
        "attention_backward": (0.76, NO_FLASH),
    },
    "a100x8": {
        "matmul": (0.737, MLI.format("A100 80 GB, matrices of 8,192 x 8,192 in float16 at 230 TFLOP/s of 312")),
        "matmul.tf32": (0.744, MLI.format("A100 80 GB, matrices of 8,192 x 8,192 in TF32 at 116 TFLOP/s of 156")),
        "matmul.float32": (
            0.723,
            "bewantbe/busy-gemm-benchmark, README: A100 40 GB, products in float32 by PyTorch at 14.1 TFLOP/s of 19.5",
        ),
        "attention": (
            0.531,
            "liangan1/GPU_travel, performance/flash-attn/README.md: FlashAttention-2 on an A100, heads of 128 "
            "channels; mean of 177.67 and 185.64 TFLOP/s without a causal mask (1,024 and 4,096 tokens), 143.70 and "
            "156.27 with one; of 312",
        ),
        "attention_backward": (0.468, "assumed, not measured: backward's share of forward's rate as on an H100, 0.88"),
    },
    "h100x8": {
        "matmul": (
            0.751,
            "pytorch/pytorch, issue 100850 on GitHub: torch.bmm on an H100, one product of 2,048 tokens and 8,192 "
            "channels, at 742.7 TFLOP/s of 989",
        ),
        "matmul.float32": (0.723, "assumed, not measured: as on an A100"),
        "attention": (0.331, FLASH + "mean of 369.9 TFLOP/s without a causal mask and 284.1 with one; of 989"),
        "attention_backward": (0.292, FLASH + "backward; mean of 290.6 TFLOP/s and 287.1; of 989"),
    },
}
"""By hardware description and class, or class and type of numbers: the share of the peak, and who says so."""

MEMORY: dict[str, tuple[float, str]] = {
    "v100x8": (0.871, MLI.format("V100 16 GB, a vector times a number, 784 GB/s read and written of 900")),
    "a100x8": (0.793, MLI.format("A100 80 GB, a vector times a number, 1,616 GB/s read and written of 2,039")),
    "h100x8": (0.768, "NVIDIA/nccl, issue 1264 on GitHub: copies on one H100 SXM at 2,573 GB/s, of 3,350"),
}
"""The share of the memory's bandwidth, one for all classes."""
