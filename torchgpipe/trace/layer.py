"""Layers of a traced module. Each layer makes some of the module's calls.

A layer holds the module's own submodules, parameters and buffers under their names, such as
`layer1.0.conv2`. The modules around them, such as `layer1`, are empty modules.

A state of the layers has the same names as the module's state: the layer's own name in the
sequence, such as `12:layer1/0/conv2`, is left out. The layer leaves it out when a state is read,
and hooks of the sequence put it in when a state is loaded.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from torchgpipe.skip.scope import Namespace, SkipKey, current_scope
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of
from torchgpipe.tensors.observe import NOTHING
from torchgpipe.trace.calls import BatchSize, Call, Device, Held, LayerPlan, Value
from torchgpipe.trace.generalise import Grows
from torchgpipe.trace.parts import tensors_in, within
from torchgpipe.trace.signature import Signature, arguments

# Pickles of older versions have these names.
Step, Batch = Call, BatchSize


class Layer(Module):
    """A module that makes some of the calls of a traced module.

    Args:
        root: The traced module.
        plan: The calls, and the values that enter and leave the layer.
        namespace: The namespace of the skips.
        extra: The tensors of the traced module that it has not registered, by name.
    """

    def __init__(
        self, root: Module, plan: LayerPlan, namespace: Namespace, extra: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.training = root.training
        self.name = plan.name
        self._steps = _steps(plan)
        self._inputs = tuple(plan.inputs)
        self._outputs = tuple(plan.outputs)
        self._batch = plan.batch
        self._namespaces: dict[str, Namespace] = {}
        self._stashed: list[tuple[SkipKey, int]] = []
        self._popped: list[tuple[SkipKey, int]] = []
        for name, value in plan.stashes:
            self._namespaces[name] = namespace
            self._stashed.append((SkipKey(namespace, name), value))
        for name, value in plan.pops:
            self._namespaces[name] = namespace
            self._popped.append((SkipKey(namespace, name), value))
        self._skips = {"stash": frozenset(dict(plan.stashes)), "pop": frozenset(dict(plan.pops))}
        # The order in which names are held becomes the order of the parameters. Dictionaries keep
        # it, while the order of sets differs from process to process.
        modules: dict[str, None] = {}
        tensors: dict[str, None] = {}
        for step in self._steps:
            if isinstance(step.target, str):
                modules[step.target] = None
            for held in within((step.args, step.kwargs), Held):
                tensors[held.name] = None
        for name in (*sorted(modules, key=len), *sorted(tensors, key=len)):
            self.hold(root, name, extra.get(name))

    # Checks the batch size. Only the first layer has it.
    sizes: Callable[[Sequence[Tensor], bool], None] | None = None

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Make the calls."""
        tensors = tensors_of(input)
        if self.sizes is not None:
            self.sizes(tensors, self.training)
        scope = current_scope()
        values = dict(zip(self._inputs, tensors, strict=True))
        device = tensors[0].device
        for key, number in self._popped:
            values[number] = scope.pop(key)  # type: ignore[assignment]
        size = 0
        if self._batch is not None:
            value, dimension, each = self._batch
            size = values[value].shape[dimension] // each
        del input, tensors  # so that a value is freed when it is spent

        for step in self._steps:
            target: Any = step.target
            if isinstance(target, str):
                target = _submodule(self, target)
            with NOTHING if step.grad else torch.no_grad():
                args, kwargs = self._filled((step.args, step.kwargs), values, size, device)
                result = target(*args, **kwargs)
            values.update(zip(step.outputs, tensors_in(result), strict=True))
            del args, kwargs, result
            for number in step.spent:
                del values[number]
        for key, number in self._stashed:
            scope[key] = values[number]
        outputs = tuple([values[number] for number in self._outputs])
        return outputs[0] if len(outputs) == 1 else outputs

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the state with the names that it has in the traced module."""
        return super().state_dict(
            *args, destination=destination, prefix=self._outer(prefix), keep_vars=keep_vars
        )

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """Yield the submodules with the names that they have in the traced module.

        The layer itself has its name in the sequence, unless it has parameters or buffers: PyTorch
        derives their names from the layer's.
        """
        own = self._parameters or self._buffers
        outer = self._outer(f"{prefix}.")[:-1]
        for name, module in super().named_modules(memo, outer, remove_duplicate):
            if module is self and not own:
                yield prefix, module
            else:
                yield name, module

    def hold(self, root: Module, name: str, extra: Tensor | None = None) -> None:
        """Hold a tensor or a submodule of the traced module under the name that it has there.

        Args:
            root: The traced module.
            name: The name.
            extra: The tensor, if the traced module has not registered it.
        """
        *path, last = name.split(".")
        here: Any = self
        there = root
        for part in path:
            if here._modules.get(part) is None:
                around = _Around()
                around.training = root.training
                here._modules[part] = around
            here = here._modules[part]
            if extra is None:
                there = _submodule(there, part)
        if extra is not None:
            here.register_buffer(last, extra, persistent=False)
            return
        for kind in ("_modules", "_parameters", "_buffers"):
            registered = vars(there)[kind]
            if last in registered:
                vars(here)[kind][last] = registered[last]
        here._non_persistent_buffers_set |= there._non_persistent_buffers_set & {last}

    def _filled(self, kept: Any, values: dict[int, Tensor], size: int, device: torch.device) -> Any:
        """Return recorded arguments with tensors, numbers and the device filled in."""
        # A function within `forward` would refer to itself, and keep the tensors until they are
        # collected as garbage.
        kind = type(kept)
        filled = kept
        if kind is Value:
            filled = values[kept.number]
        elif kind is tuple or kind is list:
            filled = kind([self._filled(x, values, size, device) for x in kept])
        elif kind is Held:
            path, _, last = kept.name.rpartition(".")
            owner = _submodule(self, path)
            filled = owner._buffers[last] if last in owner._buffers else owner._parameters[last]
        elif kind is Grows:
            filled = kept.each * size + kept.fixed
        elif kind is Device:
            filled = device
        elif kind is dict:
            filled = {key: self._filled(x, values, size, device) for key, x in kept.items()}
        elif kind is slice:
            ends = (kept.start, kept.stop, kept.step)
            filled = slice(*self._filled(ends, values, size, device))
        return filled

    def _outer(self, prefix: str) -> str:
        """Return a prefix of names without the layer's name in the sequence, which may end it."""
        outer = prefix.removesuffix(f"{self.name}.")
        return outer if outer == "" or outer.endswith(".") else prefix


def _steps(plan: LayerPlan) -> list[Call]:
    """Return the calls of a layer, with the values that each may let go."""
    needed = {*plan.outputs, *dict(plan.stashes).values()}
    steps: list[Call] = []
    for call in reversed(plan.calls):
        used = {value.number for value in within((call.args, call.kwargs), Value)}
        used.update(call.outputs)
        if call is plan.calls[0]:
            used.update(plan.inputs, dict(plan.pops).values())
        steps.append(call._replace(spent=tuple(sorted(used - needed))))
        needed |= used
    steps.reverse()
    return steps


class Layers(nn.Sequential):
    """The layers of a traced module, which are called like the module and have its state.

    `GPipe` takes them as any other `nn.Sequential`.

    Args:
        layers: The layers by name.
        signature: What the module takes and returns. A slice has none: it takes and returns
            tensors, as its layers do.
    """

    def __init__(
        self, layers: OrderedDict[str, Module], signature: Signature | None = None
    ) -> None:
        super().__init__(layers)
        self.signature = signature
        keep_names(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layers one after another; take and return what the module does."""
        if self.signature is None:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        tensors = self.signature.flat(args, kwargs)
        outputs = super().forward(tensors)  # type: ignore[no-untyped-call]
        return self.signature.structured(outputs)


def flat(module: Module, sample: Any) -> TensorOrTensors:
    """Return the tensors that `module` takes for a sample of its arguments.

    A module that is not a `Layers` takes the sample itself.
    """
    signature = module.signature if isinstance(module, Layers) else None
    return sample if signature is None else signature.flat(*arguments(sample))


def batched(module: Module) -> Sequence[bool] | None:
    """Return which of the tensors that `module` takes have a batch dimension; `None` for all."""
    signature = module.signature if isinstance(module, Layers) else None
    return None if signature is None else signature.batched


def keep_names(module: Module) -> None:
    """Let `module` load a state that has the names of the traced module.

    The module's children may be layers of a traced module.
    """
    module.register_load_state_dict_pre_hook(_into_layers)
    module.register_load_state_dict_post_hook(_out_of_layers)


def _into_layers(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put the names of layers into the names of a state."""
    given = dict(state)
    for key, layer in module._modules.items():
        if isinstance(layer, Layer) and layer.name == key:
            inner = f"{prefix}{key}."
            for name in layer.state_dict(prefix=inner, keep_vars=True):
                if name in given:
                    state[inner + name.removeprefix(prefix)] = given[name]
                    state.pop(name, None)


def _out_of_layers(module: Module, incompatible: Any) -> None:
    """Take the names of layers out of the names of missing and unexpected keys."""
    for key, layer in module._modules.items():
        if isinstance(layer, Layer) and layer.name == key:
            for names in incompatible:
                names[:] = [name.replace(f"{key}.", "", 1) for name in names]


class _Around(Module):
    """An empty module, in the place of a module around one that a layer holds."""


def _submodule(module: Module, path: str) -> Any:
    """Return a submodule by its path, even if an attribute has the same name."""
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    return module
