"""Run the forward hooks that are registered on the pipeline itself, in `model.step`.

`model(x)` calls the module, so PyTorch runs the hooks. `model.step` does not call the module, so it
runs the hooks itself:

- Forward pre-hooks get the input of the mini-batch.
- Forward hooks of the user get the output of each micro-batch, before the criterion gets it. (In a
  step, there is no output of the whole mini-batch.)
- Forward hooks that `torch.distributed` has registered, such as those of `replicate`, prepare the
  backward. So they get the loss of the mini-batch.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a call."""


def run_with_hooks(
    model: nn.Module, given: Arguments, run: Callable[[Arguments], Tensor]
) -> Tensor:
    """Run forward pre-hooks, then `run`, then forward hooks of `torch.distributed`.

    Args:
        model: The pipeline, with its hooks.
        given: The arguments of the call. A pre-hook can change them.
        run: Runs the step with these arguments, and returns the loss.

    Returns:
        The loss, which a forward hook can have changed.

    Raises:
        RuntimeError: If the pipeline has a full backward hook, which would not see the outputs.
    """
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
    """Run the user's forward hooks on an output, and return what they have made of it."""
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
