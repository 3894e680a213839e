"""Run the forward hooks of a pipeline in `model.step`, which PyTorch does not do.

PyTorch runs the hooks that are registered on a module when the module is called, as in `model(x)`.
`model.step` does not call the pipeline, so it runs the pipeline's hooks itself:

- Forward pre-hooks get the input of the mini-batch.
- Forward hooks that the user has registered get the output of each micro-batch, before the
  criterion gets it. (In a step, there is no output of the whole mini-batch.)
- Forward hooks that `torch.distributed` has registered get the loss of the mini-batch, because
  these hooks prepare its backward. `replicate` has such a hook.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a call."""


def run_with_hooks(
    model: nn.Module, given: Arguments, run: Callable[[Arguments], Tensor]
) -> Tensor:
    """Run a training step between the pipeline's forward pre-hooks and its forward hooks.

    After the step, only those forward hooks run that `torch.distributed` has registered. The user's
    forward hooks run during the step, on the output of each micro-batch (see `seen_by_hooks`).

    Args:
        model: The pipeline, with its hooks.
        given: The arguments of the step. A pre-hook can change them.
        run: A function that runs the step with these arguments, and returns the loss.

    Returns:
        The loss, which a forward hook can have changed.

    Raises:
        RuntimeError: If the pipeline has a full backward hook, which would not see the outputs.
    """
    if torch.is_grad_enabled() and (model._backward_hooks or model._backward_pre_hooks):
        raise RuntimeError(
            "a full backward hook on a pipeline does not see the outputs of step(); put the hook "
            "on the first or last layer, or train with loss.backward() on a loss of model(x)"
        )
    args, kwargs = given
    for key, hook in model._forward_pre_hooks.items():
        if key in model._forward_pre_hooks_with_kwargs:
            changed = hook(model, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(model, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    loss = run((args, kwargs))
    for key, hook in model._forward_hooks.items():
        if _is_of_pytorch(hook):
            loss = _seen_by(hook, key, model, loss)
    return loss


def seen_by_hooks(model: nn.Module, output: Any) -> Any:
    """Run the user's forward hooks on a micro-batch's output; return the output after them.

    A hook can replace the output by another one.
    """
    for key, hook in model._forward_hooks.items():
        if not _is_of_pytorch(hook):
            output = _seen_by(hook, key, model, output)
    return output


def _seen_by(hook: Callable[..., Any], key: int, model: nn.Module, output: Any) -> Any:
    no_arguments: tuple[Any, ...] = ((), {}) if key in model._forward_hooks_with_kwargs else ((),)
    changed = hook(model, *no_arguments, output)
    return output if changed is None else changed


def _is_of_pytorch(hook: Callable[..., Any]) -> bool:
    function = getattr(hook, "func", hook)  # of a `partial`
    return str(getattr(function, "__module__", "")).startswith("torch.distributed")
