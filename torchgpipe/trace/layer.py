"""Layers of a traced module: each makes some of its calls. Their state has the names that it has in that module.

A layer holds the module's own submodules, parameters and buffers under their names, such as `layer1.0.conv2`; modules
on the way to them are empty ones. The layer's own name in the sequence, such as `12:layer1/0/conv2`, is left out of the
names of state: by the layer when state is read, and by hooks of the sequence when it is loaded.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip.scope import Namespace, SkipKey, current_scope
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of
from torchgpipe.tensors.observe import NOTHING
from torchgpipe.trace.calls import BatchSize, Call, Device, Held, LayerPlan, Value
from torchgpipe.trace.generalise import Grows
from torchgpipe.trace.parts import tensors_in, within
from torchgpipe.trace.signature import Signature, arguments

Step, Batch = Call, BatchSize  # their names in pickles of older versions


class Layer(nn.Module):
    """Make some of the calls of a traced module, `root`; `extra` are its tensors that it has not registered."""

    def __init__(
        self, root: nn.Module, plan: LayerPlan, namespace: Namespace, extra: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.training = root.training
        self.name = plan.name
        # Each call lets go of the values that no later one uses.
        needed = {*plan.outputs, *(number for _, number in plan.stashes)}
        given = {*plan.inputs, *(number for _, number in plan.pops)}
        self._steps: list[Call] = []
        for i, call in reversed([*enumerate(plan.calls)]):
            passed = [x.number for x in within((call.args, call.kwargs), Value)]
            used = {*passed, *call.outputs, *(given if i == 0 else ())}
            self._steps.insert(0, call._replace(spent=tuple(sorted(used - needed))))
            needed |= used
        self._inputs, self._outputs = tuple(plan.inputs), tuple(plan.outputs)
        self._skips = {
            "stash": frozenset(n for n, _ in plan.stashes),
            "pop": frozenset(n for n, _ in plan.pops),
        }
        self._namespaces = {name: namespace for name, _ in (*plan.stashes, *plan.pops)}
        self._stashed, self._popped = (
            [(SkipKey(namespace, name), value) for name, value in skips]
            for skips in (plan.stashes, plan.pops)
        )
        self._batch = plan.batch
        # Not sets, whose order differs from process to process: it becomes that of the parameters.
        modules = dict.fromkeys(step.target for step in self._steps if isinstance(step.target, str))
        names = dict.fromkeys(
            x.name for x in within([(step.args, step.kwargs) for step in self._steps], Held)
        )
        for held in (*sorted(modules, key=len), *sorted(names, key=len)):
            self.hold(root, held, extra.get(held))

    sizes: Callable[[Sequence[Tensor], bool], None] | None = None  # of the first layer

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Make the calls; take and return tensors, or tuples of them."""
        if self.sizes is not None:
            self.sizes(tensors_of(input), self.training)
        scope = current_scope()
        values = dict(zip(self._inputs, tensors_of(input), strict=True))
        device = tensors_of(input)[0].device
        for key, number in self._popped:
            values[number] = scope.pop(key)  # type: ignore[assignment]
        size = (
            0
            if self._batch is None
            else values[self._batch.value].shape[self._batch.dimension] // self._batch.each
        )
        del input

        for step in self._steps:
            target: Any = (
                _submodule(self, step.target) if isinstance(step.target, str) else step.target
            )
            with NOTHING if step.grad else torch.no_grad():
                args, kwargs = self._filled((step.args, step.kwargs), values, size, device)
                result = target(*args, **kwargs)
            values.update(zip(step.outputs, tensors_in(result), strict=True))
            del args, kwargs, result
            for number in step.spent:
                del values[number]
        for key, number in self._stashed:
            scope[key] = values[number]
        outputs = tuple(values[number] for number in self._outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the state with the names that it has in the traced module."""
        return super().state_dict(
            *args, destination=destination, prefix=self._outer(prefix), keep_vars=keep_vars
        )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules with the names that they have in the traced module, this layer with its own."""
        own = self._parameters or self._buffers  # whose names PyTorch derives from the layer's
        for name, module in super().named_modules(
            memo, self._outer(f"{prefix}.")[:-1], remove_duplicate
        ):
            yield prefix if module is self and not own else name, module

    def hold(self, root: nn.Module, name: str, extra: Tensor | None = None) -> None:
        """Hold a submodule, parameter or buffer of `root`, or an `extra` tensor, by its name."""
        *path, last = name.split(".")
        here: Any = self
        there = root
        for part in path:
            if here._modules.get(part) is None:
                here._modules[part] = _Around()
                here._modules[part].training = root.training
            here = here._modules[part]
            if extra is None:
                there = _submodule(there, part)
        if extra is not None:
            return here.register_buffer(last, extra, persistent=False)  # type: ignore[no-any-return]
        for kind in ("_modules", "_parameters", "_buffers"):
            if last in vars(there)[kind]:
                vars(here)[kind][last] = vars(there)[kind][last]
        here._non_persistent_buffers_set |= there._non_persistent_buffers_set & {last}

    def _filled(self, kept: Any, values: dict[int, Tensor], size: int, device: torch.device) -> Any:
        """Return arguments with tensors, numbers and the device in them."""
        # A function within `forward` would refer to itself, and keep the tensors until they are collected.
        kind = type(kept)
        if kind is Value:
            return values[kept.number]
        if kind is tuple or kind is list:
            return kind([self._filled(x, values, size, device) for x in kept])
        if kind is Held:
            path, _, last = kept.name.rpartition(".")
            owner = _submodule(self, path)
            return owner._buffers[last] if last in owner._buffers else owner._parameters[last]
        if kind is Grows:
            return kept.each * size + kept.fixed
        if kind is Device:
            return device
        if kind is dict:
            return {key: self._filled(x, values, size, device) for key, x in kept.items()}
        if kind is slice:
            return slice(*self._filled((kept.start, kept.stop, kept.step), values, size, device))
        return kept

    def _outer(self, prefix: str) -> str:
        """Return a prefix of names without this layer's own name, if that is the one it has in the sequence."""
        outer = prefix.removesuffix(f"{self.name}.")
        return outer if outer == "" or outer.endswith(".") else prefix


class Layers(nn.Sequential):
    """The layers of a traced module: called like it, and with its state.

    `GPipe` takes it as any `nn.Sequential`. A slice of it takes and returns what its layers do.
    """

    def __init__(
        self, layers: OrderedDict[str, nn.Module], signature: Signature | None = None
    ) -> None:
        super().__init__(layers)
        self.signature = signature
        keep_names(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layers one after another; take and return what the module does."""
        if self.signature is None:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        outputs = super().forward(self.signature.flat(args, kwargs))  # type: ignore[no-untyped-call]
        return self.signature.structured(outputs)


def flat(module: nn.Module, sample: Any) -> TensorOrTensors:
    """Return the tensors that `module` takes for a sample of its arguments; others than `Layers` take the sample."""
    signature = module.signature if isinstance(module, Layers) else None
    return sample if signature is None else signature.flat(*arguments(sample))


def batched(module: nn.Module) -> Sequence[bool] | None:
    """Return which of the tensors that `module` takes have a batch dimension; `None` if all have one."""
    signature = module.signature if isinstance(module, Layers) else None
    return None if signature is None else signature.batched


def keep_names(module: nn.Module) -> None:
    """Let `module`, whose children may be layers, load a state with the names that it has in the traced module."""
    module.register_load_state_dict_pre_hook(_into_layers)
    module.register_load_state_dict_post_hook(_out_of_layers)


def _into_layers(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    given = dict(state)
    for key, layer in module._modules.items():
        if isinstance(layer, Layer) and layer.name == key:
            for name in layer.state_dict(prefix=f"{prefix}{key}.", keep_vars=True):
                if name in given:
                    state[f"{prefix}{key}.{name[len(prefix) :]}"] = given[name]
                    state.pop(name, None)


def _out_of_layers(module: nn.Module, incompatible: Any) -> None:
    keys = [
        f"{key}."
        for key, layer in module._modules.items()
        if isinstance(layer, Layer) and layer.name == key
    ]
    for names in incompatible:
        for i, name in enumerate(names):
            for key in keys:
                names[i] = name = name.replace(key, "", 1)


class _Around(nn.Module):
    """An empty module, in place of one that contains what a layer holds."""


def _submodule(module: nn.Module, path: str) -> Any:
    """Return a submodule by its path, whatever attributes of that name there are."""
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    return module
