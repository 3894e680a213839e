"""The loss that `step` returns. Its `backward()` raises an error, because `step` has run it."""

from typing import Any, NoReturn

from torch import Tensor


def without_backward(loss: Tensor) -> Tensor:
    """Return the loss without its graph, and with a `backward()` that raises a clear error.

    In all other ways, the returned loss is an ordinary tensor. Its copies, its saved versions and
    the tensors that are computed from it have the usual `backward()`.
    """
    saved = loss.detach()
    returned = loss.detach()
    # Python finds an object's own attributes before the methods of its class. `pickle` and
    # `torch.save` call `__reduce_ex__`, and so they get a tensor without these attributes.
    vars(returned).update(backward=_refuse, __reduce_ex__=saved.__reduce_ex__)
    return returned


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "step() has run the backward already: remove loss.backward(); or, to run the backward "
        "yourself, call loss = model.loss(criterion, input, target) in place of step()"
    )
