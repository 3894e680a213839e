"""Results for submodules that are kept as one layer and cannot run on fake tensors.

`sequential` records a module's calls on fake tensors, which have shapes but no values. If a
submodule needs values, the recording takes the shapes of its results from runs on real tensors.
"""

from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence

from torchgpipe.trace.code.lengths import with_lengths
from torchgpipe.trace.code.sizes import Size, Sizes
from torchgpipe.trace.generalise import Differs, general
from torchgpipe.trace.parts import Slots, within
from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.restore import as_it_was
from torchgpipe.trace.signature import Signature, Tensors

Form = tuple[tuple[Any, ...], torch.dtype, torch.device]
"""The shape of a tensor (with `Size` for lengths that follow from sizes), dtype and device."""


class NeedsResults(Exception):
    """Raised within `sequential` if a submodule that is kept as one layer fails on fake tensors.

    Then the module is recorded again, with results that the submodule has given for real tensors.
    """


_Result = tuple[Any, list[Form]]
"""The result of a call: its structure with slots for the tensors, and the tensors' forms."""


class KeptResults:
    """The structures and shapes of the results of submodules that are kept as one layer.

    A submodule may need the contents of its inputs, such as the lengths of sequences. Such a
    submodule cannot run on fake tensors. Then the whole module runs on real tensors: the sample,
    with several batch sizes. In these runs, the results of all submodules that are kept as one
    layer are noted.

    Args:
        module: The module.
        signature: The module's signature.
        inputs: The tensors of the sample.
        whole: The submodules that are kept as one layer.

    Raises:
        Untraceable: If the module is on `meta`, or if the shapes of a result do not follow from
            the batch size and from the lengths that may change.
    """

    def __init__(
        self, module: Module, signature: Signature, inputs: Tensors, whole: Container[Module]
    ) -> None:
        if any(x.is_meta for x in (*inputs, *module.parameters(), *module.buffers())):
            raise Untraceable(
                f"a submodule of {type(module).__name__} kept as one layer needs the values of "
                "tensors, which do not exist on device meta; call sequential with the module on "
                "the CPU"
            )
        paths = {path: part for path, part in module.named_modules() if part in whole}
        self._slots: dict[str, list[Slots]] = {}
        runs = []
        # The shapes must not depend on which samples are chosen, either.
        points = 2 * signature.points
        for k, sizes in enumerate(points):
            resized = _resized(signature, inputs, sizes, first=k < len(signature.points))
            run: dict[str, list[_Result]] = {path: [] for path in paths}
            slots: dict[str, list[Slots]] = {path: [] for path in paths}
            with as_it_was(module), torch.inference_mode(False), torch.no_grad():
                for path, part in paths.items():
                    keep = partial(_keep, run[path], slots[path])
                    part.register_forward_hook(keep)
                with signature.at(sizes, module):
                    signature.call(module, resized)
            runs.append(run)
            self._slots = self._slots or slots
        try:
            self._calls = general(runs, points)
        except Differs as error:
            raise Untraceable(
                f"a submodule of {type(module).__name__} that is kept as one layer returns tensors "
                f"whose shapes are not determined by the batch size: {error}"
            ) from None

    def __contains__(self, path: str) -> bool:
        return path in self._slots

    def result(self, path: str, call: int, sizes: Sizes, device: torch.device | None) -> Any:
        """Return what a submodule would return for inputs of the given sizes.

        The tensors in the result have the right shapes and dtypes, but their memory is not
        initialized.

        Args:
            path: The path of the submodule in the module.
            call: The index of the call, among all calls of this submodule.
            sizes: The batch size, and the lengths that may change.
            device: The device of the tensors. With `None`, they are on the devices that they had in
                the run on the sample.
        """
        structure, forms = self._calls[path][call]
        tensors = []
        for shape, dtype, own_device in forms:
            lengths = [n.at(sizes) if isinstance(n, Size) else n for n in shape]
            tensors.append(torch.empty(lengths, dtype=dtype, device=device or own_device))
        return self._slots[path][call].put_back(structure, tensors)


def _keep(
    results: list[_Result], slots: list[Slots], module: nn.Module, inputs: Any, result: Any
) -> None:
    """Note the structure and shapes of a submodule's result; this is the submodule's forward hook.

    Args:
        results: The list to which the structure and the shapes are added.
        slots: The list to which the placeholders of the result's tensors are added.
        module: The submodule.
        inputs: The inputs of the submodule.
        result: The result of the submodule.
    """
    if any(within(result, PackedSequence)):
        name = type(module).__name__
        raise Untraceable(
            f"the submodule {name} is kept as one layer and returns a PackedSequence, which other "
            "layers cannot take; keep a larger submodule, which also unpacks it, as one layer, or "
            f"return padded sequences from {name} (pad_packed_sequence)"
        )
    taken = Slots()
    structure = taken.taken(result)
    forms = [(tuple(x.shape), x.dtype, x.device) for x in taken.tensors]
    results.append((structure, forms))
    slots.append(taken.again())


def _resized(signature: Signature, inputs: Tensors, sizes: Sizes, *, first: bool) -> list[Tensor]:
    """Return the example input's tensors with another batch size and other lengths.

    For this, some samples of the batch are left out or repeated. The samples stay in their order,
    because sequences can be sorted by their lengths.

    Args:
        signature: The signature of the module.
        inputs: The tensors of the sample.
        sizes: The batch size, and the lengths that may change.
        first: Whether the first sample of the batch is kept in any case. If not, the last sample
            is.
    """
    size = sizes[0]
    resized = []
    given = zip(inputs, signature.batched, signature.places, strict=True)
    for x, batched, places in given:
        x = with_lengths(x, places, sizes)
        if batched:
            chosen = [k * len(x) // size for k in range(size)]
            x = x[chosen] if first else x[[len(x) - 1 - k for k in reversed(chosen)]]
        resized.append(x.detach().clone())
    return resized
