"""Hooks on a pipeline itself, in a step: it has no output of the mini-batch that they could see.

`model(x)` is a call of the module, and PyTorch runs the hooks. In `model.step`, hooks before the
forward get the input. Hooks after it get what the criterion will get, the output of each
micro-batch. PyTorch's own hooks, such as those of `replicate`, get the loss of the mini-batch,
whose backward they prepare.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: those by place, and those by name."""


def run_with_hooks(
    model: nn.Module, given: Arguments, run: Callable[[Arguments], Tensor]
) -> Tensor:
    """Return what `run` makes of arguments, after the hooks before the forward have seen them."""
    if model._backward_hooks or model._backward_pre_hooks:
        raise RuntimeError(
            "a full backward hook on a pipeline does not see the outputs of step(); put it on the "
            "first or last layer, or call loss.backward() on a loss of model(x)"
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
    """Return what hooks after the forward make of an output; they find no arguments."""
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
