"""Record the calls that a module's forward makes, with placeholders in place of tensors."""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from torchgpipe.tensors._autograd import refuse_transforms, storage_of
from torchgpipe.trace.code.call import Call, Device, Held, Value, result_of
from torchgpipe.trace.code.sizes import Sizes
from torchgpipe.trace.kept import KeptResults, NeedsResults
from torchgpipe.trace.parts import Slots, tensors_in
from torchgpipe.trace.refuse import WITHOUT_CACHE, Untraceable, Where, class_of, refused, where
from torchgpipe.trace.restore import random_states
from torchgpipe.trace.whole import NOTED, Notes, add_note, stays_whole

Run = Callable[..., Any]

# Arguments of these types are recorded as they are.
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


class Recorder(TorchFunctionMode):
    """A `TorchFunctionMode` that records the calls that a module's forward makes.

    It records each call of a PyTorch function, and each call of a submodule that is kept whole (not
    cut into layers). PyTorch tells the mode about calls of functions. The context `watched` tells
    it about calls of modules. Calls within a recorded call are not recorded.

    Args:
        root: The module.
        whole: The submodules that the user keeps whole, and submodules that cannot be recorded.
        notes: A dictionary. An entry is added for each module that uses something that a recording
            cannot repeat.
        results: The results, for real tensors, of submodules that cannot run on fake tensors. With
            `None`, such submodules raise an error.

    Attributes:
        sizes: The batch size of the fake tensors, then the lengths named in `dynamic_shapes`.
        device: The device of all fake tensors. With `None`, they have the devices of real tensors.
        fake: The `FakeTensorMode` that makes the fake tensors.
        calls: The recorded calls.
        shapes: Maps the number of each input, and of each tensor that a call made, to its shape.
        extra: Maps new names to tensors of the module that are neither parameters nor buffers.
        refused: The first line that cannot be recorded, and the reason; `None` if there is none.
    """

    def __init__(
        self,
        root: Module,
        whole: Container[Module],
        notes: Notes,
        results: KeptResults | None = None,
    ) -> None:
        super().__init__()
        self.root = root
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.calls: list[Call] = []
        self.shapes: list[tuple[int, ...]] = []
        self.extra: dict[str, Tensor] = {}
        self.refused: tuple[Where, str] | None = None
        self.sizes: Sizes = ()
        self.device: torch.device | None = None
        self._whole = whole
        self._notes = notes
        self._results = results
        self._kept_calls = Counter[str]()  # how often each submodule was called
        self._paths = {module: path for path, module in root.named_modules()}
        # The name of each tensor that the module holds, by the tensor's id.
        self._names: dict[int, str] = {}
        parameters = root.named_parameters(remove_duplicate=False)
        buffers = root.named_buffers(remove_duplicate=False)
        held = [*parameters, *buffers]
        for name, x in held:
            self._names.setdefault(id(x), name)
        self._device_type = held[0][1].device.type if held else "cpu"
        # Maps ids of inputs, and of tensors that calls made, to their numbers. `_alive` keeps the
        # tensors alive, because Python could give the id of a freed object to another tensor.
        self._numbers: dict[int, int] = {}
        # Maps ids of fake tensors in attributes of modules to the tensors that they replace.
        self._originals: dict[int, Tensor] = {}
        self._alive: list[object] = []
        # The index of the call that made each storage.
        self._made: dict[int, int] = {}
        self._calls_under_way = 0
        # The modules whose forward is running and is recorded; the innermost is last. After an
        # error, they stay in this list, so that the error's message can name them.
        self._opened = [root]
        self._thread = threading.get_ident()
        # The states of random generators, which the recorded code must not change. `None` if this
        # is not checked, because other threads may draw random numbers meanwhile.
        self._random: tuple[Any, ...] | None = random_states()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.passes():
            return func(*args, **kwargs)
        refuse_transforms(forward_mode=False)
        if func in NOTED:
            self.note(NOTED[func])
        return self.call(func, func, args, kwargs)

    def call_module(self, module: Module, run: Run, args: Any, kwargs: Any) -> Any:
        """Call a module. If it is kept whole, record this call, or else the calls in its forward.

        Args:
            module: The module.
            run: A function that calls a module. Its first argument is the module.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        if self.passes():
            return run(module, *args, **kwargs)
        inner = module in self._paths and module is not self.root
        if inner and stays_whole(module, self._whole):
            if any(id(x) not in self._names for x in module.parameters()):
                self.note("tensors in the place of parameters, by functional_call")
            self.note_draws()
            run_whole = partial(self._run_whole, module, partial(run, module))
            result = self.call(run_whole, self._paths[module], args, kwargs)
            if self._random is not None:
                self._random = random_states()
            return result
        depth = len(self._opened)
        self._opened.append(module)
        result = run(module, *args, **kwargs)
        del self._opened[depth:]
        return result

    def put_fakes(self, device: torch.device | None) -> None:
        """Replace the module's parameters and buffers by fake tensors, on `device` if given.

        Modules that are kept whole can also have plain tensors as attributes, such as the weight of
        a hook of `torch.nn.utils.spectral_norm`. With `device`, these are replaced, too.
        """
        fakes: dict[int, Tensor] = {}  # The keys are ids of tensors, which can have several names.
        for module in self.root.modules():
            holders: Any = (module._parameters, module._buffers)
            for holder in holders:
                for name, x in holder.items():
                    if x is None:
                        continue
                    if id(x) not in fakes:
                        fakes[id(x)] = self._fake_of(x, device)
                    y = fakes[id(x)]
                    holder[name] = y
                    self._names[id(y)] = self._names[id(x)]
            if device is not None and module in self._whole:
                for name, x in vars(module).items():
                    if isinstance(x, Tensor):
                        vars(module)[name] = y = self._fake_of(x, device)
                        self._originals[id(y)] = x
                        self._alive.append(y)

    def _fake_of(self, x: Tensor, device: torch.device | None) -> Tensor:
        if device is None:
            return self.fake.from_tensor(x)
        self._device_type = device.type
        self._random = None  # Other threads may draw random numbers during the recording.
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return nn.Parameter(y, x.requires_grad) if isinstance(x, nn.Parameter) else y

    def passes(self) -> bool:
        """Return whether to ignore a call: it is inside a recorded call, or in another thread."""
        return self._calls_under_way > 0 or threading.get_ident() != self._thread

    def note(self, what: str) -> None:
        """Note that the innermost running module uses `what`, which a recording cannot repeat."""
        if not self.passes():
            add_note(self._notes, self._opened[-1], what)

    def note_draws(self) -> None:
        """Note that the running module draws random numbers, if a generator's state has changed."""
        if self._random is not None and random_states() != self._random:
            self.note("a random state")

    def add(self, x: Tensor, call: int) -> int:
        """Give the next number to a tensor, and return the number.

        The tensor was made by the call with the index `call`, or is an input if `call` is -1.
        """
        number = len(self.shapes)
        self._alive.append(x)
        self._numbers[id(x)] = number
        self.shapes.append(tuple(x.shape))
        self._made.setdefault(storage_of(x), call)
        return number

    def number(self, x: Tensor) -> int:
        """Return the number of a tensor in the module's result, or raise `Untraceable`."""
        if id(x) not in self._numbers:
            raise Untraceable(
                f"the module {type(self.root).__name__} returns a tensor that no call has made, "
                "such as a parameter; do not return it, or return a copy of it (x.clone())"
            )
        return self._numbers[id(x)]

    def call(self, run: Run, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and record this call if it makes a tensor or changes a tensor in place.

        Args:
            run: The function to run.
            target: What is recorded as the target of the call: a function, or a submodule's name.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        self._calls_under_way += 1
        try:
            given = list(tensors_in((args, kwargs)))
            versions = [x._version for x in given]
            result = run(*args, **kwargs)
            made = list(tensors_in(result))
            before = zip(given, versions, strict=True)
            changed = [x for x, version in before if x._version != version]
            if not made and not changed:
                return result
            template = self._template(args), self._template(kwargs)
            index = len(self.calls)
            since = index
            for x in changed:
                since = min(since, self._made.get(storage_of(x), index))
            views = self._views(made, changed)
            if views:
                memo = {id(x): x for x in made}
                result = copy.deepcopy(result, memo | views)
                self._alive.append(result)
            outputs: list[int] = []
            for x in made:
                number = self._numbers.get(id(x))
                if id(x) in views:
                    number = self.add(views[id(x)], index)
                elif number is None:
                    number = self.add(x, index)
                outputs.append(number)
            returned = result_of(result, outputs)
            call = Call(target, *template, tuple(outputs), torch.is_grad_enabled(), returned)
            caller = self._paths.get(self._opened[-1], "")
            self.calls.append(call._replace(caller=caller, since=since, where=where()))
            return result
        finally:
            self._calls_under_way -= 1

    def _views(self, made: list[Tensor], changed: list[Tensor]) -> dict[int, Tensor]:
        """Return views that replace those tensors in a call's result that existed before the call.

        Some calls, such as `contiguous`, return their argument for one batch size, and a new tensor
        for another. Thanks to the view, the call's result gets a new number in both cases. But a
        tensor that the call has changed in place keeps its number. The dictionary maps the id of
        each replaced tensor to its view.
        """
        kept = set(map(id, changed))
        views: dict[int, Tensor] = {}
        for x in made:
            key = id(x)
            known = key in self._numbers or key in self._names
            if known and key not in kept and key not in views:
                views[key] = x.view_as(x)
        return views

    def refusal(self, at: Where, why: str) -> Untraceable:
        """Return the error for a line that cannot be recorded; the message says what to do."""
        self.refused = self.refused or (at, why)
        modules = [m for m in self._opened if m is not self.root]
        if modules:
            module = modules[-1]
            kind = class_of(module, self.root)
            what = f"keep its {type(module).__name__} as one layer: whole=[{kind}]"
        else:
            what = "put that part into a submodule, and keep it whole: whole=[ThatClass]"
        return refused(self.root, at, why, what)

    def _run_whole(self, module: Module, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Run a module on fake tensors, which have no values.

        If a module of `whole` fails because it needs values, its result for real tensors is used.
        """
        path = self._paths[module]
        call = self._kept_calls[path]
        self._kept_calls[path] += 1
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if module not in self._whole:
                self._opened.append(module)  # the error is about this module
                raise
            if self._results is None or path not in self._results:
                raise NeedsResults from error
        return self._results.result(path, call, self.sizes, self.device)

    def _template(self, value: Any) -> Any:
        """Return a copy of an argument with placeholders in place of tensors and devices."""
        if isinstance(value, Tensor):
            return self._stand_in(value)
        if type(value) in (tuple, list, torch.Size):
            kind = list if type(value) is list else tuple
            return kind(map(self._template, value))
        if isinstance(value, slice):
            return slice(*map(self._template, (value.start, value.stop, value.step)))
        if type(value) is dict:
            return {key: self._template(x) for key, x in value.items()}
        return self._other(value)

    def _stand_in(self, x: Tensor) -> Value | Held:
        """Return the placeholder of a tensor."""
        x = self._originals.get(id(x), x)
        key = id(x)
        if key in self._numbers:
            return Value(self._numbers[key])
        if key not in self._names:
            if isinstance(x, FakeTensor):
                raise self.refusal(where(), "it uses a tensor that no recorded call has made")
            if x.requires_grad:
                raise self.refusal(where(), "it uses a parameter that is not registered")
            name = f"traced constants.{len(self.extra)}"  # no module has such a name
            self.extra[name] = x
            self._alive.append(x)
            self._names[key] = name
        return Held(self._names[key])

    def _other(self, value: Any) -> Any:
        """Return what to record for an argument that is neither a tensor nor a structure.

        This is the argument itself, or a placeholder for a device of the same type as the module's.
        """
        if isinstance(value, torch.Generator):
            add_note(self._notes, self._opened[-1], "a generator of its own")
            return value
        if isinstance(value, torch.device):
            return Device() if value.type == self._device_type else value
        if isinstance(value, _PLAIN):
            return value
        slots = Slots()
        taken = slots.taken(value)
        closed = isinstance(taken, FunctionType) and taken.__closure__
        if slots.tensors or closed:
            kind = type(taken).__name__
            why = f"it passes an argument of type {kind} that holds tensors or a closure"
            if "cache" in kind.lower():
                raise refused(self.root, where(), why, WITHOUT_CACHE)
            raise self.refusal(where(), why)
        return taken
