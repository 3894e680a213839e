"""`Recorder`: keeps the calls of a module's forward, with what stands for tensors in their arguments."""

import copy
import random
import sys
import threading
from collections.abc import Callable, Container
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from torchgpipe.tensors._autograd import is_compiled, refuse_transforms, storage_of
from torchgpipe.trace.calls import Call, Device, Held, Value
from torchgpipe.trace.parts import Slots, tensors_in
from torchgpipe.trace.refuse import Untraceable, refused, where

Notes = dict[nn.Module, tuple[str, tuple[str, int]]]
"""Modules whose forward uses what a recording cannot repeat, such as "training": that, and the file and line."""


class Recorder(TorchFunctionMode):
    """Keep a call for each function of PyTorch that `root` calls, and for each submodule that stays whole.

    As a mode it sees the functions; `watched` tells it of modules. What a recorded call does inside is not recorded.
    """

    def __init__(
        self, root: nn.Module, whole: set[nn.Module], fake: FakeTensorMode, notes: Notes
    ) -> None:
        super().__init__()
        self._root = root
        self._whole = whole
        self._fake = fake
        self._paths = {m: path for path, m in root.named_modules()}
        held = [
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        ]
        self._names = {
            id(x): name for name, x in reversed(held)
        }  # id of a tensor that the module holds -> its name
        self._device_type = next((x.device.type for _, x in held), "cpu")
        self._thread = threading.get_ident()
        self._real: dict[
            int, Tensor
        ] = {}  # id of a fake tensor that stands for one of the module's -> that one
        self._numbers: dict[
            int, int
        ] = {}  # id of a tensor that is an input, or made by a call -> its number
        self._alive: list[
            object
        ] = []  # what has such an id, which is its own only for as long as it lives
        self._made: dict[int, int] = {}  # storage -> the call that made it
        self._calls_under_way = 0
        # Modules whose forward is in progress and recorded, the innermost last; after an error still those.
        self._opened = [root]
        self.calls: list[Call] = []
        self.shapes: list[tuple[int, ...]] = []
        self.extra: dict[str, Tensor] = {}
        self._notes = notes
        self._random: tuple[Any, ...] | None = random_states()  # as recorded code has to leave them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.passes():
            return func(*args, **kwargs)
        refuse_transforms(forward_mode=False)
        if func in _NOTED:
            self.note(_NOTED[func])
        return self.call(func, func, args, kwargs)

    def call_module(
        self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a module: record the call if the module stays whole, or else what its forward calls."""
        if self.passes():
            return run(module, *args, **kwargs)
        if module in self._paths and module is not self._root and stays_whole(module, self._whole):
            path = self._paths[module]
            if any(id(x) not in self._names for x in module.parameters()):
                self.note("tensors in the place of parameters, by functional_call")
            self.note_draws()
            result = self.call(
                partial(self._run_whole, module, partial(run, module)), path, args, kwargs
            )
            self._random = self._random and random_states()
            return result
        depth = len(self._opened)
        self._opened.append(module)
        result = run(module, *args, **kwargs)
        del self._opened[depth:]
        return result

    def put_fakes(self, device: torch.device | None) -> None:
        """Put fake tensors in the place of the module's own; with a device, on that."""

        def fake(x: Tensor) -> Tensor:
            if device is None:
                return self._fake.from_tensor(x)
            self._device_type, self._random = device.type, None  # other threads may draw meanwhile
            y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            return nn.Parameter(y, x.requires_grad) if isinstance(x, nn.Parameter) else y

        fakes: dict[int, Tensor] = {}
        for module in self._root.modules():
            holders: Any = (module._parameters, module._buffers)
            for holder in holders:
                for name, x in holder.items():
                    if x is not None:
                        holder[name] = y = fakes[id(x)] = fakes.get(
                            id(x), fake(x)
                        )  # it may have two places
                        self._names[id(y)] = self._names[id(x)]
                        self._real[id(y)] = x

    def passes(self) -> bool:
        """Return whether nothing is to be recorded now: within a recorded call, and in another thread."""
        return self._calls_under_way > 0 or threading.get_ident() != self._thread

    def note(self, what: str) -> None:
        """Note that the forward in progress uses what a recording cannot repeat."""
        if not self.passes():
            self._notes.setdefault(self._opened[-1], (what, where()))

    def note_draws(self) -> None:
        """Note that the forward in progress has moved a random state."""
        if self._random is not None and random_states() != self._random:
            self.note("a random state")

    def add(self, x: Tensor, call: int) -> int:
        """Give a new tensor its number."""
        self._alive.append(x)
        self._numbers[id(x)] = len(self.shapes)
        self.shapes.append(tuple(x.shape))
        self._made.setdefault(storage_of(x), call)
        return len(self.shapes) - 1

    def number(self, x: Tensor) -> int:
        """Return the number of a tensor that the module returns."""
        if id(x) not in self._numbers:
            raise Untraceable(
                f"{type(self._root).__name__} returns a tensor that no call has made, such as a parameter; "
                "leave it out, or return a copy (x.clone())"
            )
        return self._numbers[id(x)]

    def call(self, run: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call and record it, unless it neither makes nor changes a tensor."""
        self._calls_under_way += 1
        try:
            given = [*tensors_in((args, kwargs))]
            versions = [x._version for x in given]
            result = run(*args, **kwargs)
            made = [*tensors_in(result)]
            changed = [
                x for x, version in zip(given, versions, strict=True) if x._version != version
            ]
            if not made and not changed:
                return result
            kept = self._template(args), self._template(kwargs)
            index = len(self.calls)
            since = min((self._made.get(storage_of(x), index) for x in changed), default=index)
            # Some calls, such as `contiguous`, may return what they were given, and for another batch a new tensor.
            # So that their result has a number of its own in both cases, a view stands for it here.
            known = {id(x): x for x in made if id(x) in self._numbers or id(x) in self._names}
            views = {i: x.view_as(x) for i, x in known.items() if not any(x is y for y in changed)}
            if views:
                result = copy.deepcopy(result, {**{id(x): x for x in made}, **views})
                self._alive.append(result)
            outputs = tuple(
                self._numbers[id(x)]
                if id(x) in self._numbers and id(x) not in views
                else self.add(views.get(id(x), x), index)
                for x in made
            )
            caller = self._paths.get(self._opened[-1], "")
            call = Call(
                target,
                *kept,
                outputs,
                torch.is_grad_enabled(),
                caller=caller,
                since=since,
                where=where(),
            )
            self.calls.append(call)
            return result
        finally:
            self._calls_under_way -= 1

    def refusal(self, at: tuple[str, int], why: str) -> Untraceable:
        """Return the error that says at which line, and what to do."""
        modules = [m for m in self._opened if m is not self._root]
        kind = type(modules[-1]).__name__ if modules else "ThatClass"
        what = (
            f"keep its {kind} as one layer: "
            if modules
            else "put that part into a submodule, and keep it whole: "
        )
        return refused(self._root, at, why, f"{what}whole=[{kind}]")

    def _run_whole(
        self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module on fake tensors; where it needs their contents, run a copy of it on real ones."""
        try:
            return run(*args, **kwargs)
        except Exception:
            if module not in self._whole:
                raise
        slots = Slots()
        template = slots.taken((args, kwargs))
        with unset_fake_temporarily(), torch.random.fork_rng(), torch.no_grad():
            real = [_filled(x) for x in slots.tensors]
            args, kwargs = slots.put_back(template, real)
            held = [
                (y, self._real[id(y)].detach()) for y in (*module.parameters(), *module.buffers())
            ]
            memo = {id(y): _filled(y) if x.is_meta else x.clone() for y, x in held}
            result = copy.deepcopy(module, memo)(*args, **kwargs)
        slots = Slots()
        template = slots.taken(result)
        return slots.put_back(template, [self._fake.from_tensor(x) for x in slots.tensors])

    def _template(self, value: Any) -> Any:
        """Return an argument of a call with a `Value`, `Held` or `Device` in place of each tensor and device."""
        if isinstance(value, Tensor):
            if id(value) in self._numbers:
                return Value(self._numbers[id(value)])
            if id(value) not in self._names:
                if isinstance(value, FakeTensor):
                    raise self.refusal(
                        where(), "it uses a tensor that was made in a way that is not recorded"
                    )
                if value.requires_grad:
                    raise self.refusal(where(), "it uses a parameter that is not registered")
                self._alive.append(value)
                name = f"traced constants.{len(self.extra)}"  # no module has such a name
                self.extra[name] = value
                self._names[id(value)] = name
            return Held(self._names[id(value)])
        if isinstance(value, torch.Generator):
            self._notes.setdefault(self._opened[-1], ("a generator of its own", where()))
            return value
        if isinstance(value, torch.device):
            return Device() if value.type == self._device_type else value
        if type(value) in (tuple, list, torch.Size):
            kind = list if type(value) is list else tuple
            return kind(map(self._template, value))
        if isinstance(value, slice):
            return slice(*map(self._template, (value.start, value.stop, value.step)))
        if type(value) is dict:
            return {key: self._template(x) for key, x in value.items()}
        if not isinstance(value, _PLAIN):
            slots = Slots()
            value = slots.taken(value)
            closed = isinstance(value, FunctionType) and value.__closure__
            if slots.tensors or closed:
                raise self.refusal(
                    where(),
                    f"it passes on a {type(value).__name__} that holds tensors or a closure; if it is a cache, have "
                    "none made (use_cache=False)",
                )
        return value


_PLAIN = (
    int,
    float,
    bool,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    BuiltinFunctionType,
    type,
)
_OPENED = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
# What a tensor is asked for that may be otherwise when the layers run, and what has effects beside its result.
_NOTED: dict[Any, str] = {
    **{
        getattr(Tensor, name).__get__: name
        for name in ("requires_grad", "is_leaf", "grad_fn", "grad", "_base")
    },
    **{getattr(Tensor, name).__set__: name for name in ("requires_grad", "grad", "data")},
    **{
        f: f.__name__
        for f in (
            Tensor.is_contiguous,
            Tensor.stride,
            Tensor.storage_offset,
            Tensor.dim_order,
            Tensor._is_view,
            Tensor.is_inference,
            Tensor.requires_grad_,
            Tensor.register_hook,
            Tensor.register_post_accumulate_grad_hook,
            Tensor.backward,
        )
    },
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def stays_whole(module: nn.Module, whole: Container[nn.Module]) -> bool:
    """Return whether a call of a submodule is recorded, and not what its forward calls."""
    own = type(module).__module__.startswith("torch.") and not isinstance(module, _OPENED)
    childless = not any(child is not None for child in module._modules.values())
    return module in whole or own or hooks_of(module) or is_compiled(module) or childless


def hooks_of(module: nn.Module) -> bool:
    """Return whether a module has hooks that run when it is called."""
    return any(value for name, value in vars(module).items() if name in HOOKS)


def random_states() -> tuple[Any, ...]:
    """Return what tells the states of the generators that PyTorch, Python and NumPy draw from by default."""
    numpy = sys.modules.get("numpy")
    _, keys, *others = numpy.random.get_state() if numpy else ("", b"")
    with unset_fake_temporarily():
        return (
            torch.default_generator.get_state().numpy().tobytes(),
            random.getstate(),
            bytes(keys),
            others,
        )


def check_notes(root: nn.Module, notes: Notes) -> None:
    """Refuse what a recording cannot repeat. Of another mode there will be another recording."""
    for what, at in notes.values():
        if what != "training":
            raise refused(
                root,
                at,
                f"it sets or asks for {what}, which may be otherwise, or would be missed, when the layers run",
                "do that in a submodule of its own; what torch.utils.checkpoint does, the pipeline does itself",
            ) from None


def _filled(x: Tensor) -> Tensor:
    """Return a real tensor like a fake one, with contents."""
    real = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return real.normal_() if x.is_floating_point() else real
