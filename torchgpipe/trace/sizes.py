"""`Sizes`: a list of calls is right for some batch sizes; see whether it is for another, when that is first met."""

import copy
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.trace.calls import Recording
from torchgpipe.trace.generalise import generalise
from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.record import record
from torchgpipe.trace.recorder import HOOKS, stays_whole
from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.signature import Signature


class Sizes:
    """Called with a module's inputs, refuse a batch size for which it does something else than its layers.

    Of each new size a copy of the module, without contents and hooks, is recorded, and compared with `recordings`.
    """

    def __init__(
        self, module: nn.Module, signature: Signature, inputs: Sequence[Tensor], whole: Container[nn.Module],
        recordings: Sequence[Recording],
    ) -> None:  # fmt: skip
        self._signature, self._recordings, self._known = signature, recordings, {r.size for r in recordings}
        self._inputs = [torch.empty_like(x, device="meta", requires_grad=x.requires_grad) for x in inputs]
        self._whole = [name for name, m in module.named_modules() if m is not module and stays_whole(m, whole)]
        self._device = next(x.device for x in (*module.parameters(), *module.buffers(), *inputs))
        # Recording changes tensors that submodules hold beside parameters and buffers, if the forward does.
        own = {id(x) for x in (*module.parameters(), *module.buffers())}
        held = [x for m in module.modules() for x in tensors_in([*vars(m).values()]) if id(x) not in own]
        self._plain = [(x, x.detach().clone()) for x in held]
        memo: dict[int, Any] = {id(x): copied for x, copied in self._plain}
        memo |= {id(x): nn.Buffer(torch.empty_like(x, device="meta")) for x in module.buffers()}
        memo |= {id(x): nn.Parameter(torch.empty_like(x, device="meta"), x.requires_grad) for x in module.parameters()}
        memo |= {id(x): type(x)() for m in module.modules() for name, x in vars(m).items() if name in HOOKS}
        try:
            self._module = copy.deepcopy(module, memo)
        except Exception as error:
            why = f"cannot be copied, to see what it does with other batch sizes ({type(error).__name__}: {error})"
            raise Untraceable(f"{type(module).__name__} {why}; make copy.deepcopy work on it") from None
        for norm in (m for m in self._module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)):
            norm.training = False  # as the module's may be by then; in training it would refuse a single sample

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Raise `Untraceable` if the layers are not right for the batch size of these inputs."""
        size = next(len(x) for x, batched in zip(tensors, self._signature.batched, strict=True) if batched)
        if size not in self._known and not tensors[0].is_meta:
            with ThreadPoolExecutor(1) as thread:  # which modes of the present thread do not reach, such as autocast
                thread.submit(self._check, size).result()
            self._known.add(size)

    def __deepcopy__(self, memo: object) -> "Sizes":
        return self

    def _check(self, size: int) -> None:
        whole = map(self._module.get_submodule, self._whole)
        found = record(self._module, whole, self._inputs, self._signature, size, {}, self._device)
        found.extra.update({name: y for name, x in found.extra.items() for y, copied in self._plain if x is copied})
        generalise(self._module, [*self._recordings, found])
