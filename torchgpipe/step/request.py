"""The arguments of `step` and `evaluate` except for the input, and checks of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from torchgpipe.caught import shortened

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]
"""A function of an output and its target.

It returns a loss, or a tuple of a loss and a value for `model.logs`.
"""


class StepRequest(NamedTuple):
    """The arguments of `step` or `evaluate`, except for the input."""

    criterion: Criterion
    target: Any
    reduction: str
    weight: Callable[[Any], Any] | None
    logs: list[Any]
    """A list to fill with what the criterion logs of each micro-batch."""
    scaler: torch.amp.GradScaler | None = None
    backward: bool = True
    """Whether to run backwards, as `step` does. `evaluate` runs only forwards."""
    looks: bool = False
    """Whether to look at the losses' graphs for what the criterion counts, which takes time."""

    @property
    def call(self) -> str:
        """The method that was called: "step" or "evaluate"."""
        return "step" if self.backward else "evaluate"


def check_criterion(given: object, call: str = "step") -> None:
    """Raise `TypeError` if the criterion that was given to a method is not a function.

    Args:
        given: What was given as the criterion.
        call: The method that was called, such as `step`, for the error message.
    """
    if isinstance(given, type):
        raise TypeError(about_class(given))
    if not callable(given):
        raise TypeError(
            "the criterion must be a function of an output and its target, but got "
            f"{type(given).__name__}; call {call}(criterion, input, target)"
        )


def about_class(given: type) -> str:
    """Return the message of the error for a class that was given as the criterion."""
    name = given.__name__
    return (
        f"the criterion must be a function, but got the class {name}; give an object of this "
        f"class: {name}()"
    )


def options_of(criterion: Criterion) -> dict[str, Any] | None:
    """Return a dictionary of the options of a PyTorch criterion, such as `ignore_index`.

    The criterion can be a loss module, a function of `torch.nn.functional`, or a `partial` of such
    a function. For any other criterion, return `None`.
    """
    if isinstance(criterion, nn.Module) and type(criterion).__module__ == "torch.nn.modules.loss":
        return {**vars(criterion), **criterion._buffers}
    function = getattr(criterion, "func", criterion)
    if getattr(function, "__module__", None) != "torch.nn.functional":
        return None
    default = {"ignore_index": -100} if function in (cross_entropy, nll_loss) else {}
    return {**default, **getattr(criterion, "keywords", {})}


def check_without_target(request: StepRequest) -> None:
    """Raise `TypeError` if a criterion is one of PyTorch's, which needs a target but has none."""
    criterion = request.criterion
    if options_of(criterion) is not None:
        function = getattr(criterion, "func", criterion)
        name = getattr(function, "__name__", type(criterion).__name__)
        raise TypeError(f"{name} needs a target: call {request.call}(criterion, input, target)")


def scalar(loss: object, call: str = "step") -> Tensor:
    """Check that the result of a criterion is a loss, and return it.

    Raises:
        TypeError: If the result is not a scalar. The message names the user's call, `call`.
    """
    advice = ""
    returned = type(loss).__name__
    if isinstance(loss, Tensor):
        if not loss.dim():
            return loss
        returned = f"one of shape {tuple(loss.shape)}"
        advice = "; return its mean, as a criterion without reduction='none' does"
    elif loss is None:
        advice = "; return the loss"
    elif isinstance(loss, int | float):
        advice = "; leave out .item()"
    elif isinstance(loss, dict | tuple):
        advice = "; return (loss, logs) if you want to log more"
        if call == "loss":
            advice = "; to log more, call step(criterion, input, target), which takes (loss, logs)"
    raise TypeError(f"the criterion must return a scalar tensor, but returned {returned}{advice}")


def start_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Make a gradient scaler create its scale, which `scaler.step` needs on every rank.

    A scaler creates its scale when it first scales a loss. Ranks without the last stage have no
    loss, so here every rank scales a zero.

    Raises:
        TypeError: If `step` was given something else than a gradient scaler.
    """
    if isinstance(scaler, type) or not callable(getattr(scaler, "scale", None)):
        raise TypeError(
            "scaler must be a torch.amp.GradScaler(), or over ranks a ShardedGradScaler(), but got "
            + shortened(scaler)
        )
    scaler.scale(torch.zeros((), device=device))
