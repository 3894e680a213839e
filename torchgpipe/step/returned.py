"""Make the loss that `step` returns, whose `backward()` raises an error.

The reason is that `step` has already run the backward.
"""

from typing import Any, NoReturn

from torch import Tensor


def without_backward(loss: Tensor) -> Tensor:
    """Return a copy of a loss without its graph, whose `backward()` raises a clear error.

    In all other ways, the returned loss is an ordinary tensor. Copies of it, tensors computed from
    it, and what `torch.load` returns after it was saved have the usual `backward()`.
    """
    saved = loss.detach()
    returned = loss.detach()
    # Python finds an object's own attributes before the methods of its class. `pickle` and
    # `torch.save` call `__reduce_ex__`, which is that of `saved`, so they save a tensor without
    # these attributes.
    vars(returned).update(backward=_refuse, __reduce_ex__=saved.__reduce_ex__)
    return returned


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "step() has run the backward already: remove loss.backward(); or, to run the backward "
        "yourself, call loss = model.loss(criterion, input, target) in place of step()"
    )
