"""`NoOutput`: what a call of the pipeline returns on ranks that do not have the output."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.trace.parts import tensors_in

_LINE = (
    "only the rank of the last stage has the output of model(x): on all ranks, call "
    "model.step(criterion, x, target), or loss = model.loss(criterion, x, target) and "
    "loss.backward(), which call the criterion on that rank"
)
_BACKWARDS = (Tensor.backward, torch.autograd.grad)


class NoOutput(Tensor):
    """The scalar zero that the pipeline returns on ranks that do not have its output.

    Its `backward()` runs this rank's part of the backward. The scalar can be added up or scaled
    like any other. But an error is raised if it is used like an output, for example in a loss.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch that has a `NoOutput` (a scalar) among its arguments.

        Raises:
            RuntimeError: If the function uses the scalar like an output: if another argument is a
                tensor with dimensions, such as a target, or if the function fails.
        """
        if func in _BACKWARDS:
            with without_torch_function():  # otherwise gradients would become `NoOutput`, too
                return func(*args, **(kwargs or {}))
        for x in tensors_in((args, kwargs)):
            if not isinstance(x, cls) and x.dim():
                raise RuntimeError(_LINE)
        run: Any = super().__torch_function__  # PyTorch does not declare its types
        try:
            return run(func, types, args, kwargs)
        except (IndexError, RuntimeError, TypeError) as error:
            raise RuntimeError(_LINE) from error

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __iter__(self) -> NoReturn:
        raise TypeError(_LINE)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_LINE)
