"""Make operators on device `meta` run as they would on a CPU or a GPU.

On `meta`, PyTorch uses no fused kernels, and its autocast does nothing. So this module chooses the
fused kernels, and casts the inputs of operators as autocast would. The lists of operators in this
module come from PyTorch's documentation ("Autocast Op Reference"). An operator that is in no list
runs in the dtype of its inputs, or in the widest of their dtypes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe.plan.count.attention import Arguments, attention

WRITTEN_IN_PYTHON = ("torch.nn.functional", "torch.functional")
CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

PRODUCTS = (
    "matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm einsum linear prelu "
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution "
    "scaled_dot_product_attention "
)
MORE_PRODUCTS = (
    "mv addmv addr chain_matmul linalg_multi_dot linalg_vecdot lstm gru rnn_tanh rnn_relu "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
LOSSES = (
    "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss l1_loss "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d "
    "nll_loss_nd cross_entropy_loss poisson_nll_loss smooth_l1_loss soft_margin_loss "
    "triplet_margin_loss kl_div "
)
SENSITIVE = (
    "pow __pow__ __rpow__ acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 logsumexp "
    "reciprocal rsqrt softmax log_softmax softmin softplus layer_norm group_norm rms_norm norm "
    "renorm sum prod cumsum cumprod dist cdist pdist cosine_similarity"
)
MORE_ON_CPU = "avg_pool3d binary_cross_entropy huber_loss prod reflection_pad1d"

LOWER = {"cpu": frozenset(PRODUCTS.split()), "cuda": frozenset((PRODUCTS + MORE_PRODUCTS).split())}
"""The names of the operators that run in autocast's dtype, for each type of device."""
FULL = {
    "cpu": frozenset((LOSSES + MORE_ON_CPU).split()),
    "cuda": frozenset((LOSSES + SENSITIVE).split()),
}
"""The names of the operators that run in float32 under autocast, for each type of device."""


@contextmanager
def as_on(device: str, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Make this thread's operators on `meta` run as they would on "cuda" or "cpu".

    Within this context, operators use the fused kernels of this type of device. If autocast is
    enabled for the type, the inputs of operators are cast.

    Args:
        device: The type of device, "cuda" or "cpu".
        autocast: The dtype with which to enable autocast, or `None` to leave autocast as it is.
    """
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    if autocast is not None:  # `torch.autocast` refuses a device that this machine does not have.
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, autocast)
    try:
        with _AsOn(device):
            yield
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


class _AsOn(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (body := _body(func)) is not None:
            with self:  # The mode is off while it handles a function.
                return body(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if torch.is_autocast_enabled(self.device):
            args, kwargs = _cast(self.device, name, args, kwargs)
        if name == "scaled_dot_product_attention":
            result = attention(self.device, Arguments(*args, **kwargs))
            if result is not None:
                return result
        if func is torch.dropout and self.device == "cuda" and _drops(*args, **kwargs):
            # CUDA has a single kernel for dropout. It keeps a mask with one byte for each element.
            return torch.native_dropout(*args, **kwargs)[0]
        return func(*args, **kwargs)


def _drops(input: Tensor, p: float, train: bool) -> bool:
    return train and 0 < p < 1 and input.numel() > 0


@functools.cache
def _body(func: Any) -> Callable[..., Any] | None:
    """Return a copy of a PyTorch function that shows its operators to a `TorchFunctionMode`.

    Some functions of PyTorch are written in Python, such as
    `torch.nn.functional.multi_head_attention_forward`. If a mode is active, such a function shows
    the mode only its own call, but not the operators that it runs. The copy lacks the check for an
    active mode, so it shows the operators.

    Return `None` if `func` is not such a function.
    """
    if not isinstance(func, FunctionType) or func.__globals__["__name__"] not in WRITTEN_IN_PYTHON:
        return None
    unchecked = {**func.__globals__, **dict.fromkeys(CHECKS, lambda *_: False)}
    body = FunctionType(
        func.__code__, unchecked, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _cast(
    device: str, name: str, args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Return an operator's arguments, cast to the dtype that autocast chooses on this device."""
    if name in LOWER[device]:
        dtype = torch.get_autocast_dtype(device)
    elif name in FULL[device]:
        dtype = torch.float32
    else:
        return args, kwargs
    return _to(args, dtype), _to(kwargs, dtype)


def _to(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, Tensor):
        eligible = item.is_floating_point() and item.dtype is not torch.float64
        return item.to(dtype) if eligible else item
    if type(item) in (tuple, list):
        return type(item)(_to(x, dtype) for x in item)
    if type(item) is dict:
        return {key: _to(x, dtype) for key, x in item.items()}
    return item
