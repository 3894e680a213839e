"""Record what a module calls: run it once on fake tensors, which have shapes and no contents.

Every function of PyTorch that the module calls becomes a `Call`, and so does every call of a submodule that stays
whole: one of PyTorch's own layers, one without submodules, or one with hooks. A question about a tensor (its shape, its
dtype) becomes none. What needs a tensor's contents cannot be recorded.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from torchgpipe.trace.calls import Recording
from torchgpipe.trace.parts import Slots
from torchgpipe.trace.recorder import Notes, Recorder
from torchgpipe.trace.refuse import Untraceable, line_of
from torchgpipe.trace.signature import Signature
from torchgpipe.trace.watch import as_it_was, watched

_CONTENTS = (DataDependentOutputException, DynamicOutputShapeException)


def record(
    module: nn.Module, whole: Iterable[nn.Module], inputs: Sequence[Tensor], signature: Signature, size: int,
    notes: Notes, device: torch.device | None = None,
) -> Recording:  # fmt: skip
    """Record what a module does with fake tensors like `inputs`; those with a batch dimension get `size` samples.

    The module is left as it was. To `notes` those modules are added whose forward uses what a recording cannot repeat.
    A module on `meta`, and its inputs, are taken to be on `device`. Raise `Untraceable` where contents are needed.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    random = torch.get_rng_state()
    recorder = Recorder(module, set(whole), fake, notes)
    with as_it_was(module), torch.inference_mode(False), torch.enable_grad(), fake, watched(recorder):
        recorder.put_fakes(device)
        given = []
        for x, batched in zip(inputs, signature.batched, strict=True):
            shape = (size, *x.shape[1:]) if batched else x.shape
            given.append(torch.empty(shape, dtype=x.dtype, device=device or x.device, requires_grad=x.requires_grad))
            recorder.add(given[-1], -1)
        try:
            with recorder:
                result = signature.call(module, given)
        except Untraceable:
            raise
        except Exception as error:
            why = "it depends on what is in a tensor, not only on its shape"
            if not isinstance(error, _CONTENTS):
                why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            raise recorder.refusal(line_of(error), why) from error
        slots = Slots()
        structure = slots.taken(result)
        outputs = tuple(recorder.number(x) for x in slots.tensors)
    if device is None and not torch.equal(random, torch.get_rng_state()):
        raise Untraceable(f"{type(module).__name__} sets a random state; keep what does so as one layer, whole=[…]")
    return Recording(size, recorder.calls, recorder.shapes, (structure, slots.again()), outputs, recorder.extra)
