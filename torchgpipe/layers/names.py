"""Load a `state_dict` whose keys differ from those of a pipeline.

A pipeline's `state_dict()` has the same keys as that of the model without a pipeline. The hooks in
this module let a pipeline also load two other kinds of `state_dict`:

- one that torchgpipe 0.0.7 has saved, with keys such as `partitions.1.conv.weight`;
- one of the whole model, if this process has only some of the model's layers.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def translate_old_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the keys of a `state_dict` that torchgpipe 0.0.7 has saved, so that it can be loaded.

    For example, `partitions.1.conv.weight` becomes `conv.weight`, the key in the model without a
    pipeline. The function is a hook for `load_state_dict`, and changes `state` in place.

    Args:
        module: The pipeline.
        state: The state to load, with the keys of all modules.
        prefix: What the keys of the pipeline begin with, such as `pipeline.`.
        *_: The other arguments that PyTorch passes to such a hook. They are not used.
    """
    if any(name == "partitions" for name, _ in module.named_children()):
        return
    old = re.compile(re.escape(prefix) + r"partitions\.\d+\.")
    for key in [*state]:
        if old.match(key):
            state[prefix + old.sub("", key)] = state.pop(key)


class DropOtherLayers:
    """Let a pipeline load the `state_dict` of a model of which this process has only some layers.

    An object of this class is a hook for `load_state_dict`. It removes the entries for the
    partitions of other processes, which `load_state_dict` would otherwise report as unexpected
    keys.

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
