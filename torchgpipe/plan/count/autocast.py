"""Cast what operators are given, as autocast does: for `meta`, which follows no autocast of its own.

The lists are those of PyTorch's documentation ("Autocast Op Reference"), by the names of operators. What is in none
runs in the type of its inputs, the widest where they differ.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PRODUCTS = (
    "matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm einsum linear prelu conv1d conv2d conv3d conv_tbc "
    "conv_transpose1d conv_transpose2d conv_transpose3d convolution scaled_dot_product_attention "
)
MORE_PRODUCTS = (
    "mv addmv addr chain_matmul linalg_multi_dot linalg_vecdot lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell"
)
LOSSES = (
    "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss l1_loss margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd cross_entropy_loss poisson_nll_loss "
    "smooth_l1_loss soft_margin_loss triplet_margin_loss kl_div "
)
SENSITIVE = (
    "pow __pow__ __rpow__ acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 logsumexp reciprocal rsqrt "
    "softmax log_softmax softmin softplus layer_norm group_norm rms_norm norm renorm sum prod cumsum cumprod dist "
    "cdist pdist cosine_similarity"
)
LOWER = {"cpu": frozenset(PRODUCTS.split()), "cuda": frozenset((PRODUCTS + MORE_PRODUCTS).split())}
"""By type of device, those that run in autocast's type."""
FULL = {
    "cpu": frozenset([*LOSSES.split(), "avg_pool3d", "binary_cross_entropy", "huber_loss", "prod", "reflection_pad1d"]),
    "cuda": frozenset((LOSSES + SENSITIVE).split()),
}
"""By type of device, those that run in float32."""


def cast(device: str, name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments of the operator of that name, in the type that autocast gives it on a type of device."""
    lower = torch.get_autocast_dtype(device)
    dtype = lower if name in LOWER[device] else torch.float32 if name in FULL[device] else None
    return (args, kwargs) if dtype is None else (_to(args, dtype), _to(kwargs, dtype))


def _to(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, Tensor):
        eligible = item.is_floating_point() and item.dtype is not torch.float64
        return item.to(dtype) if eligible else item
    if type(item) in (tuple, list):
        return type(item)(_to(x, dtype) for x in item)
    return {key: _to(x, dtype) for key, x in item.items()} if type(item) is dict else item
