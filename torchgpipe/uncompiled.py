"""Run a pipeline without compiling it, even in compiled code; shorten tracebacks of errors."""

from collections.abc import Callable
from typing import Any, cast

import torch

from torchgpipe.task.where import shorten


def is_traced() -> bool:
    """Return whether `torch.jit.trace` or `torch.export` runs the caller."""
    # PyTorch does not declare both functions to type checkers.
    return bool(cast(Any, torch.compiler).is_exporting() or cast(Any, torch.jit).is_tracing())


def run_uncompiled(instead: str, run: Callable[..., Any], *args: Any) -> Any:
    """Call `run(*args)` without compiling it, even if the caller is compiled by `torch.compile`.

    Args:
        instead: What the user can trace or export in place of the pipeline, for the error message.
        run: A function that runs a mini-batch.
        args: The arguments of `run`.

    Raises:
        RuntimeError: If `torch.export` or `torch.jit.trace` is running.
    """
    untraced = f"a pipeline cannot be traced or exported; {instead}"
    if torch.compiler.is_dynamo_compiling():
        # Otherwise torch.compile would compile the scheduler anew for each task.
        return torch.compiler.disable(run, reason=untraced)(*args)
    if is_traced():
        raise RuntimeError(untraced)
    try:
        return run(*args)
    except Exception as error:
        shorten(error)
        raise
