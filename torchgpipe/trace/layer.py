"""The layers into which `sequential` cuts a module. Each layer makes some of the module's calls.

A layer has submodules, parameters and buffers of the module under their old names, such as
`layer1.0.conv2`. For this name, the layer gets a new module `layer1`, which has only a new module
`0`, which has only `conv2`.

The layers together have a `state_dict` with the same keys as the module's, such as
`layer1.0.conv2.weight`. The layers are in an `nn.Sequential`, in which each layer has a name, such
as `12:layer1/0/conv2`. `nn.Sequential` puts this name before the keys of the layer's tensors. So
`Layer.state_dict` removes the layer's name from the keys, and hooks of `load_state_dict` insert it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from torchgpipe.modules import SeveralParts
from torchgpipe.skip.scope import Namespace, SkipKey, current_scope
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of
from torchgpipe.trace.calls import LayerPlan
from torchgpipe.trace.code.call import Held
from torchgpipe.trace.code.source import Source
from torchgpipe.trace.parts import tensors_in, within
from torchgpipe.trace.signature import Signature

Calls = Callable[["Layer", list[Any]], tuple[Tensor, ...]]
"""A function that makes a layer's calls, given the layer and its input tensors."""


class Layer(Module):
    """A layer of a pipeline that makes some of the calls of a traced module.

    A traced module is a module whose calls `sequential` has recorded.

    Args:
        root: The traced module.
        plan: The calls, and the tensors that enter and leave the layer.
        namespace: The namespace of the skips (skip connections). All layers of the module share it.
        extra: Maps names to tensors of the traced module that are neither parameters nor buffers.
        size_names: The names of the batch size and of the lengths that may change.

    Attributes:
        name: The name of the layer.
    """

    _text: str
    _calls: Calls
    _compiled: Calls | None = None
    # A check that the module would make the same calls for these inputs (`SameCallsCheck`). Only
    # the first layer has one.
    check_calls: Callable[[Sequence[Tensor], bool], None] | None = None

    def __init__(
        self,
        root: Module,
        plan: LayerPlan,
        namespace: Namespace,
        extra: dict[str, Tensor],
        size_names: Sequence[str],
    ) -> None:
        super().__init__()
        self.training = root.training
        self._version = root._version
        self.name = plan.name
        self._steps = plan.steps()
        self._inputs = tuple(plan.inputs)
        self._outputs = tuple(plan.outputs)
        self._sizes_read = plan.sizes
        self._size_names = size_names
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
        # The names are collected in dictionaries, because their order becomes the order of the
        # layer's parameters. The order of a set would differ from process to process.
        modules: dict[str, None] = {}
        tensors: dict[str, None] = {}
        for step in self._steps:
            if isinstance(step.target, str):
                modules[step.target] = None
            for held in within((step.args, step.kwargs), Held):
                tensors[held.name] = None
        for name in (*sorted(modules, key=len), *sorted(tensors, key=len)):
            self.hold(root, name, extra.get(name))
        self._write()

    def _write(self) -> None:
        """Write the code of a function that makes the layer's calls, and make the function."""
        source = Source(
            self.name,
            self,
            inputs=[*self._inputs, *[number for _, number in self._popped]],
            outputs=[*self._outputs, *[number for _, number in self._stashed]],
            sizes=self._sizes_read,
            size_names=self._size_names,
            tensors_in=tensors_in,
        )
        self._text, self._calls = source.function(self._steps)

    @property
    def code(self) -> str:
        """The Python code of the function that makes the layer's calls."""
        return self._text

    @property
    def stashes(self) -> list[SkipKey]:
        """The skips (skip connections) from this layer to later layers, in the order of sending."""
        return [key for key, _ in self._stashed]

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Make the layer's calls on its input and on the skips that it pops; return its output."""
        inputs = list(tensors_of(input))
        if self.check_calls is not None:
            self.check_calls(inputs, self.training)
        scope = current_scope()
        for key, _ in self._popped:
            inputs.append(scope.pop(key))  # type: ignore[arg-type]
        outputs = (self._compiled or self._calls)(self, inputs)
        count = len(self._outputs)
        for (key, _), y in zip(self._stashed, outputs[count:], strict=True):
            scope[key] = y
        return outputs[0] if count == 1 else outputs[:count]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layer's calls by `torch.compile`.

        Only the calls are compiled, and not what the layer does around them: the check of sizes,
        hooks and skips.

        Args:
            *args: As for `torch.compile`.
            **kwargs: As for `torch.compile`.
        """
        self._compiled = torch.compile(self._calls, *args, **kwargs)
        # With this attribute, PyTorch and this library take the layer as compiled. The attribute's
        # value is the ordinary call, which also runs the layer's hooks.
        self._compiled_call_impl = self._call_impl

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in ("_calls", "_compiled"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._write()

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the layer's state under the names that it has in the traced module.

        Args:
            *args: The deprecated positional form of the arguments below.
            destination: A dictionary to which the state is added, or `None`.
            prefix: A text that is put before all names. If it ends with the layer's own name, such
                as `12:layer1/0/conv2`, this name is left out.
            keep_vars: Whether the state has the parameters themselves, and not detached tensors.
        """
        return super().state_dict(
            *args, destination=destination, prefix=self._outer(prefix), keep_vars=keep_vars
        )

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """Yield pairs of a name and a module: for the layer itself, and for its submodules.

        A submodule has the name that it has in the traced module. The layer has its own name, such
        as `12:layer1/0/conv2`. But if the layer itself has parameters or buffers, its own name is
        left out, because PyTorch would put it before the names of these tensors.

        Args:
            memo: A set of modules to leave out. All yielded modules are added to it.
            prefix: The name of the layer, with the names of the modules around it in front.
            remove_duplicate: Whether a module that occurs twice is yielded only once.
        """
        own = self._parameters or self._buffers
        outer = self._outer(f"{prefix}.")[:-1]
        for name, module in super().named_modules(memo, outer, remove_duplicate):
            if module is self and not own:
                yield prefix, module
            else:
                yield name, module

    def hold(self, root: Module, name: str, extra: Tensor | None = None) -> None:
        """Add a tensor or a submodule of the traced module to this layer, under the same name.

        Args:
            root: The traced module.
            name: The name of the tensor or submodule in the traced module.
            extra: The tensor itself, if it is not a parameter or buffer of the traced module.
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
                if isinstance(here, _Around):
                    here._version = there._version
        if extra is not None:
            here.register_buffer(last, extra, persistent=False)
            return
        for kind in ("_modules", "_parameters", "_buffers"):
            registered = vars(there)[kind]
            if last in registered:
                vars(here)[kind][last] = registered[last]
        here._non_persistent_buffers_set |= there._non_persistent_buffers_set & {last}

    def _outer(self, prefix: str) -> str:
        """Remove the layer's own name, such as `12:layer1/0/conv2`, from the end of a prefix."""
        outer = prefix.removesuffix(f"{self.name}.")
        return outer if outer == "" or outer.endswith(".") else prefix


class NamedAsTraced(Module):
    """A module whose tensors PyTorch's state-dict functions find under the traced module's names.

    PyTorch's functions `get_state_dict` and `set_state_dict`, of
    `torch.distributed.checkpoint.state_dict`, look up each tensor by its name: for `model.embed`,
    they read the attribute `model`, and then the attribute `embed` of what they have found. This
    module has no such attributes, but its layers have. PyTorch first calls `_fqn_modifiers`, which
    says where they are.
    """

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return a dictionary by which PyTorch finds tensors under the names of the traced module.

        If a value is the name of a child (a layer), PyTorch leaves this name out of the names of
        the child's tensors. If a key is the name of an attribute, PyTorch reads the attribute not
        from this module, but from the object that the value names: `_as_traced`.
        """
        modifiers: dict[str, str] = {}
        for key, layer in _traced_layers(self).items():
            # PyTorch looks up no name with a dot. So only the value has an effect.
            modifiers[f"{key}."] = key
            for registered in (layer._modules, layer._parameters, layer._buffers):
                for name in registered:
                    modifiers[name] = "_as_traced"
        return modifiers

    @property
    def _as_traced(self) -> SeveralParts:
        """An object that has the attributes of all layers of the traced module."""
        layers = _traced_layers(self)
        return SeveralParts([*layers.values()])


class Layers(NamedAsTraced, nn.Sequential):
    """The layers of a traced module: an `nn.Sequential` that is called like the module.

    A traced module is one that `sequential` has cut into layers. The layers together have the same
    `state_dict` as the module.

    Args:
        layers: Maps the name of each layer to the layer.
        signature: The structure of the module's arguments and results. `None` if these are only
            some of the module's layers, which take and return tensors.
    """

    def __init__(
        self, layers: OrderedDict[str, Module], signature: Signature | None = None
    ) -> None:
        super().__init__(layers)
        self.signature = signature
        keep_names(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layers in order; arguments and result are those of the traced module."""
        if self.signature is None:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        tensors = self.signature.flat(args, kwargs)
        outputs = super().forward(tensors)  # type: ignore[no-untyped-call]
        return self.signature.structured(outputs)


def keep_names(module: Module) -> None:
    """Let `load_state_dict` of a sequence of layers take the state of the traced module.

    The keys of the traced module's state have no names of layers in them. The sequence's own keys
    contain these names.
    """
    module.register_load_state_dict_pre_hook(_into_layers)
    module.register_load_state_dict_post_hook(_out_of_layers)


def _into_layers(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Insert names of layers, such as `12:layer1/0/conv2`, into the keys of a state to be loaded.

    This is a hook of `load_state_dict`.
    """
    given = dict(state)
    versions = getattr(state, "_metadata", {})
    for key, layer in _traced_layers(module).items():
        inner = f"{prefix}{key}."
        # The keys of `versions` also lack the layers' names.
        for path, _part in layer.named_modules():
            if f"{prefix}{path}" in versions:
                versions[inner + path] = versions[f"{prefix}{path}"]
        for name in layer.state_dict(prefix=inner, keep_vars=True):
            if name in given:
                state[inner + name.removeprefix(prefix)] = given[name]
                state.pop(name, None)


def _out_of_layers(module: Module, incompatible: Any) -> None:
    """Remove names of layers from the missing and unexpected keys that `load_state_dict` reports.

    This is a hook of `load_state_dict`.
    """
    for key in _traced_layers(module):
        for names in incompatible:
            names[:] = [name.replace(f"{key}.", "", 1) for name in names]


def _traced_layers(module: Module) -> dict[str, Layer]:
    """Return the children of a module that are layers of a traced module, by their names.

    A child that has another name than the layer itself is left out, because PyTorch then puts this
    other name before the names of the layer's tensors.
    """
    return {
        key: layer
        for key, layer in module._modules.items()
        if isinstance(layer, Layer) and layer.name == key
    }


class _Around(Module):
    """A module that stands in a layer for a submodule of which the layer has only some parts.

    If a layer has `layer1.0.conv2`, for example, its `layer1` and `layer1.0` are such modules.
    """


def _submodule(module: Module, path: str) -> Any:
    """Return the submodule at a path such as "layer1.0", even if an attribute has the same name."""
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    return module
