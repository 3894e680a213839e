"""Make the loss that `step` returns, whose `backward()` raises an error.

The reason is that `step` has already run the backward.
"""

from typing import Any, NoReturn

from torch import Tensor


def without_backward(loss: Tensor) -> Tensor:
    """Return a detached copy of a loss, whose `backward()` raises an error.

    The error says that `step` has already run the backward. Only the returned tensor has this
    special `backward()`. Tensors that are computed from it, copies of it (also by `copy.deepcopy`),
    and the tensor that `torch.load` returns after the loss was saved are ordinary tensors.
    """
    saved = loss.detach()
    returned = loss.detach()
    # Python finds an object's own attributes before the methods of its class. `pickle` and
    # `torch.save` call `__reduce_ex__`, and `copy.deepcopy` calls `__deepcopy__`. Here, these are
    # methods of `saved`. So what is saved or copied is a tensor without these attributes.
    own = {"__reduce_ex__": saved.__reduce_ex__, "__deepcopy__": saved.__deepcopy__}
    vars(returned).update(backward=_refuse, **own)
    return returned


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "step() has run the backward already: remove loss.backward(); or, to run the backward "
        "yourself, call loss = model.loss(criterion, input, target) in place of step()"
    )
