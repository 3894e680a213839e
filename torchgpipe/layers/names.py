"""The names in a pipeline's `state_dict()`: the same names as in the model without a pipeline."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def translate_old_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename, in place, the keys of a `state_dict` that torchgpipe 0.0.7 has saved.

    For example, `partitions.1.conv.weight` becomes `conv.weight`, as in the model. This is a hook
    for `load_state_dict`.

    Args:
        module: The pipeline.
        state: The state to load, with the keys of all modules.
        prefix: What the keys of the pipeline begin with, such as `pipeline.`.
        *_: The other arguments of such a hook, which are not used.
    """
    if any(name == "partitions" for name, _ in module.named_children()):
        return
    old = re.compile(re.escape(prefix) + r"partitions\.\d+\.")
    for key in [*state]:
        if old.match(key):
            state[prefix + old.sub("", key)] = state.pop(key)


class Elsewhere:
    """A hook for `load_state_dict` that ignores the entries of other processes' partitions.

    Args:
        partitions: All partitions of the pipeline.
        own: The partitions of this process.
    """

    def __init__(self, partitions: Iterable[nn.Module], own: Sequence[nn.Module]) -> None:
        self._names: set[str] = set()
        for partition in partitions:
            self._names.update(partition.state_dict())
        for partition in own:
            self._names.difference_update(partition.state_dict())

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Remove the entries from `state`."""
        for name in self._names:
            state.pop(prefix + name, None)
