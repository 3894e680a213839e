"""Record what a module calls: run it once on fake tensors, which have shapes and no contents.

Every function of PyTorch that the module calls becomes a `Call`, and so does every call of a submodule that stays
whole: one of PyTorch's own layers, one without submodules, or one with hooks. A question about a tensor (its shape, its
dtype) becomes none. What needs a tensor's contents cannot be recorded.
"""

import copy
import inspect
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from torchgpipe.trace.calls import Recording
from torchgpipe.trace.generalise import generalise
from torchgpipe.trace.parts import Slots, tensors_in
from torchgpipe.trace.recorder import HOOKS, Notes, Recorder, check_notes, stays_whole
from torchgpipe.trace.refuse import Untraceable, where
from torchgpipe.trace.signature import Signature

_one_at_a_time = threading.RLock()


def record(
    module: nn.Module,
    whole: Iterable[nn.Module],
    inputs: Sequence[Tensor],
    signature: Signature,
    size: int,
    notes: Notes,
    device: torch.device | None = None,
) -> Recording:
    """Record what a module does with fake tensors like `inputs`; those with a batch dimension get `size` samples.

    The module is left as it was. To `notes` those modules are added whose forward uses what a recording cannot repeat.
    A module on `meta`, and its inputs, are taken to be on `device`. Raise `Untraceable` where contents are needed.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(module, set(whole), fake, notes)
    with (
        as_it_was(module),
        torch.inference_mode(False),
        torch.enable_grad(),
        fake,
        watched(recorder),
    ):
        recorder.put_fakes(device)
        given, slots = [], Slots()
        for x, batched in zip(inputs, signature.batched, strict=True):
            shape = (size, *x.shape[1:]) if batched else x.shape
            given.append(
                torch.empty(
                    shape, dtype=x.dtype, device=device or x.device, requires_grad=x.requires_grad
                )
            )
            recorder.add(given[-1], -1)
        try:
            with recorder:
                result = signature.call(module, given)
                recorder.note_draws()
            structure = slots.taken(result)
        except Untraceable:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                why = "it depends on what is in a tensor, not only on its shape"
            raise recorder.refusal(where(error), why) from error
        outputs = tuple(recorder.number(x) for x in slots.tensors)
    return Recording(
        size, recorder.calls, recorder.shapes, (structure, slots.again()), outputs, recorder.extra
    )


class Sizes:
    """Called with a module's inputs, refuse a batch size for which it does something else than its layers.

    For each new size, mode and autocast, a copy of the module without contents and hooks is recorded, and compared
    with `recordings`.
    """

    def __init__(
        self,
        module: nn.Module,
        signature: Signature,
        inputs: Sequence[Tensor],
        whole: Container[nn.Module],
        recordings: Sequence[Recording],
    ) -> None:
        self._signature, self._recordings = signature, recordings
        self._whole = [
            name for name, m in module.named_modules() if m is not module and stays_whole(m, whole)
        ]
        self._state = module.training, _autocast(inputs[0])
        self._known = {(recording.size, *self._state) for recording in recordings}
        # Recording changes tensors that submodules hold beside parameters and buffers, if the forward does.
        own = {id(x): x for x in (*module.parameters(), *module.buffers())}
        held = [
            x for m in module.modules() for x in tensors_in([*vars(m).values()]) if id(x) not in own
        ]
        self._plain = [(x, x.detach().clone()) for x in held]
        memo: dict[int, Any] = {id(x): copied for x, copied in self._plain}
        for key, x in own.items():
            y = torch.empty_like(x, device="meta")
            memo[key] = nn.Parameter(y, x.requires_grad) if isinstance(x, nn.Parameter) else y
        memo |= {
            id(x): type(x)()
            for m in module.modules()
            for name, x in vars(m).items()
            if name in HOOKS
        }
        try:
            self._module = copy.deepcopy(module, memo)
        except Exception as error:
            raise Untraceable(
                f"{type(module).__name__} cannot be copied, to see what it does with other batch sizes "
                f"({type(error).__name__}: {error}); make copy.deepcopy work on it"
            ) from None

    def __call__(self, tensors: Sequence[Tensor], training: bool) -> None:
        """Raise `Untraceable` if the layers are not right for the batch size of these inputs, in this mode."""
        size = next(
            len(x) for x, batched in zip(tensors, self._signature.batched, strict=True) if batched
        )
        state = training, _autocast(tensors[0])
        if (size, *state) not in self._known and not tensors[0].is_meta:
            with ThreadPoolExecutor(1) as thread:  # which modes of the present thread do not reach
                thread.submit(self._check, tensors, size, state).result()
            self._known.add((size, *state))

    def __deepcopy__(self, memo: object) -> "Sizes":
        return self

    def _check(
        self, tensors: Sequence[Tensor], size: int, state: tuple[bool, torch.dtype | None]
    ) -> None:
        training, cast = state
        notes: Notes = {}
        device = tensors[0].device
        if self._module.training != training:
            self._module.train(training)
        for norm in (
            m for m in self._module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)
        ):
            norm.training = (
                False  # as the module's may be by then; in training it would refuse a single sample
            )
        whole = map(self._module.get_submodule, self._whole)
        with torch.autocast(device.type, cast, enabled=cast is not None):
            found = record(self._module, whole, tensors, self._signature, size, notes, device)
        check_notes(self._module, notes)
        found.extra.update(
            {name: y for name, x in found.extra.items() for y, copied in self._plain if x is copied}
        )
        if state != self._state:
            found.state = (
                f" ({'training' if training else 'evaluation'} mode, {cast or 'no'} autocast)"
            )
        generalise(self._module, [*self._recordings, found])


def _autocast(x: Tensor) -> torch.dtype | None:
    """Return the type to which autocast turns inputs such as this, if it does."""
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else None


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Show the recorder what happens beside functions of PyTorch, which are all that it sees as a `TorchFunctionMode`.

    That is calls of modules and of custom autograd functions, replaced buffers, and reads of the mode. For it, methods
    of `nn.Module` and others are replaced meanwhile, in the whole process. So what other threads do comes to the
    recorder, too. It passes that on, and records nothing of it (`Recorder.passes`).
    """
    call: Any = nn.Module.__call__
    assign: Any = nn.Module.__setattr__
    apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")

    def call_noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, call, args, kwargs)

    def assign_noted(module: nn.Module, name: str, value: Any) -> None:
        if vars(module).get("_buffers", {}).get(name, value) is not value:
            recorder.note(f"another buffer {name!r} (change it in place: self.{name}.copy_(…))")
        assign(module, name, value)

    def apply_noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = apply.__get__(None, cls)
        return run(*args, **kwargs) if recorder.passes() else recorder.call(run, run, args, kwargs)

    def read_training(module: nn.Module) -> Any:
        recorder.note("training")
        return vars(module)["training"]

    def noted(owner: Any, name: str, what: str) -> tuple[Any, str, Any]:
        run = getattr(owner, name)

        def run_noted(*args: Any, **kwargs: Any) -> Any:
            # Not where `torch.no_grad`, fake tensors and the recorder ask.
            if not sys._getframe(1).f_code.co_filename.endswith(
                ("grad_mode.py", "fake_tensor.py", "recorder.py")
            ):
                recorder.note(what)
            return run(*args, **kwargs)

        return owner, name, run_noted

    replacements = [
        (nn.Module, "__call__", call_noted),
        (nn.Module, "__setattr__", assign_noted),
        (
            nn.Module,
            "training",
            property(read_training, lambda module, value: vars(module).update(training=value)),
        ),
        (torch.autograd.Function, "apply", classmethod(apply_noted)),
        *(
            noted(owner, name, "a random state")
            for owner in (torch, torch.random, torch.cuda)
            for name in dir(owner)
            if name[0] != "_" and ("seed" in name or "rng_state" in name)
        ),
        *(
            noted(owner, name, "random numbers beside PyTorch's")
            for owner in (random, sys.modules.get("numpy.random"))
            for name in dir(owner)
            if name[0].islower() and callable(getattr(owner, name))
        ),
        noted(torch.autocast, "__enter__", "autocast"),
        noted(torch, "is_autocast_enabled", "autocast"),
        *(
            noted(torch, name, "the mode of gradients")
            for name in ("is_grad_enabled", "is_inference_mode_enabled")
        ),
        noted(torch, "from_numpy", "an array of NumPy"),
    ]
    # What was compiled runs as it was written: a compiler does not expect the recorder, and the process would end.
    with _one_at_a_time, torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(mock.patch.object(*replacement, create=True))
        yield


@contextmanager
def as_it_was(root: nn.Module) -> Iterator[None]:
    """At the end, put back attributes of the modules, what was in them, but not in parameters, and random states."""
    kept = [
        (
            m,
            dict(vars(m)),
            [(x, copy.copy(x)) for x in vars(m).values() if type(x) in (dict, OrderedDict, list)],
        )
        for m in root.modules()
    ]
    held = [x for _, attributes, _ in kept for x in attributes.values()]
    buffers = {*map(id, root.buffers())}  # which kernels may change without a new version
    tensors = [
        (x, None if id(x) in buffers else x._version, x.detach().clone())
        for x in tensors_in(held)
        if not isinstance(x, nn.Parameter) and x.is_leaf
    ]
    states = [(x, x.get_state()) for x in held if isinstance(x, torch.Generator)]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    array = numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(
            {x.device for x in (*root.parameters(), *root.buffers()) if x.is_cuda}
        ):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)
        for module, attributes, containers in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, before in containers:
                container.clear()
                container.update(before) if isinstance(container, dict) else container.extend(
                    before
                )
        with torch.no_grad():
            for x, version, y in tensors:
                if x._version != version:
                    x.copy_(y)
        for generator, state in states:
            generator.set_state(state)
