"""Write the recorded calls of a layer as the code of a Python function, and make the function.

The function for a layer with two calls, for example, is this:

    def layer_1_blocks_0_linear(self, inputs):
        x0, x1 = inputs
        inputs.clear()
        x2 = self.blocks._modules['0'].linear(x1)
        del x1
        x3 = x0.add(x2)
        del x0, x2
        return (x3,)

Each layer has a separate function, with a separate file name, because `torch.compile` keeps the
compiled code and counts recompilations for each function.
"""

import itertools
import linecache
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import resolve_name

from torchgpipe.trace.code.call import Call, Device, Held, Value
from torchgpipe.trace.code.modes import ByMode
from torchgpipe.trace.code.sizes import Size

_count = itertools.count()

# Values of these types are written by `repr`.
_WRITTEN = (int, str, bytes, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)


class SizeRead(NamedTuple):
    """How a layer finds a size, such as the batch size, from the shape of one of its tensors.

    The size is `(length of a dimension - fixed) // each`.

    Attributes:
        size: The index of the size: 0 for the batch size, then the lengths that may change.
        value: The number of the tensor, which is an input or a skip of the layer.
        dimension: The index of the tensor's dimension.
        each: How much longer the dimension is when the size is greater by one.
        fixed: The part of the dimension's length that does not depend on the size.
    """

    size: int
    value: int
    dimension: int
    each: int
    fixed: int


class Source:
    """Writes the Python code of a layer: a function that makes the layer's calls.

    The written function takes the layer, and a list of input tensors. It empties the list, so that
    each input can be freed after its last use. It returns a tuple of tensors.

    Args:
        name: The layer's name.
        layer: The layer, which has the submodules and tensors that the calls use.
        inputs: The numbers of the input tensors. In the code, tensor 4 has the name `x4`.
        outputs: The numbers of the tensors that the function returns.
        sizes: The dimensions of inputs from which the function reads the batch size and lengths.
        size_names: The names of the batch size and of the lengths.
        tensors_in: A function that yields the tensors in a structure. The written code calls it.

    Attributes:
        names: Maps the names that the code uses to the objects for which they stand.
    """

    def __init__(  # noqa: PLR0913 - each is a part of the code
        self,
        name: str,
        layer: nn.Module,
        inputs: Sequence[int],
        outputs: Sequence[int],
        sizes: Sequence[SizeRead],
        size_names: Sequence[str],
        tensors_in: Callable[[Any], Any],
    ) -> None:
        self.name = name
        self._layer = layer
        self._outputs = outputs
        self._size_names = ["batch", *map(_variable, size_names[1:])]
        self.names: dict[str, Any] = {"torch": torch, "tensors_in": tensors_in}
        self._inputs = inputs
        self._sizes = sizes
        self._uses_device = False

    def function(self, calls: Sequence[Call]) -> tuple[str, Callable[..., Any]]:
        """Write a function that makes these calls; return its code, and the function itself."""
        lines: list[str] = []
        grad = True
        for call in calls:
            if grad and not call.grad:
                lines.append("    with torch.no_grad():")
            grad = call.grad
            indent = "    " if grad else "        "
            lines.append(indent + self._statement(call))
            if call.spent:
                spent = ", ".join([f"x{number}" for number in call.spent])
                lines.append(f"{indent}del {spent}")
        lines = [*self._first_lines(), *lines, f"    return {_row(self._outputs)}"]
        text = "\n".join(lines) + "\n"
        return text, function_from(self.name, _identifier(self.name), text, self.names)

    def _first_lines(self) -> list[str]:
        """Return the first lines of the code, which assign the inputs, the device and the sizes."""
        lines = [
            f"def {_identifier(self.name)}(self, inputs):",
            f"    {_row(self._inputs)} = inputs",
            "    inputs.clear()",
        ]
        if self._uses_device:
            lines.append(f"    device = x{self._inputs[0]}.device")
        for size, value, dimension, each, fixed in self._sizes:
            length = f"x{value}.shape[{dimension}]"
            if fixed:
                length = f"({length} - {fixed})".replace("- -", "+ ")
            divided = length if each == 1 else f"{length} // {each}"
            lines.append(f"    {self._size_names[size]} = {divided}")
        return lines

    def _statement(self, call: Call) -> str:
        """Return the code of a call with its assignment, such as `x7 = self.linear(x4)`."""
        if call.target == torch.Tensor.__setitem__:
            changed, index, value = call.args
            return f"{self._text(changed)}[{self._index(index)}] = {self._text(value)}"
        if isinstance(call.target, str):
            text = f"{self._module(call.target)}({self._arguments(call.args, call.kwargs)})"
        else:
            text = self._function_call(call.target, call.args, call.kwargs)
        if not call.outputs:
            return text
        if call.result is None:
            return f"{_row(call.outputs)} = tensors_in({text})"
        return f"{_pattern(call.result)} = {text}"

    def _function_call(self, target: Callable[..., Any], args: Any, kwargs: Any) -> str:
        """Return the code of a function's call, such as `torch.cat([x3, x4])` or `x3.view(2, -1)`.

        Args:
            target: The function, or a method of `torch.Tensor`.
            args: The positional arguments, with placeholders for tensors.
            kwargs: The keyword arguments, with placeholders for tensors.
        """
        path = _path(target)
        _, _, method = path.partition("torch.Tensor.")
        if method and args and isinstance(args[0], Value | Held):
            first = self._text(args[0])
            if method == "__getitem__":
                return f"{first}[{self._index(args[1])}]"
            if method.endswith(".__get__"):
                return f"{first}.{method.removesuffix('.__get__')}"
            if method.isidentifier():
                return f"{first}.{method}({self._arguments(args[1:], kwargs)})"
        return f"{path or self._named(target)}({self._arguments(args, kwargs)})"

    def _index(self, index: Any) -> str:
        """Return the code inside the brackets of an indexed tensor, such as `:, 1:`."""
        parts = index if type(index) is tuple and len(index) > 1 else (index,)
        texts = []
        for part in parts:
            if type(part) is slice:
                start, stop, step = part.start, part.stop, part.step
                ends = ["" if end is None else self._text(end) for end in (start, stop)]
                if step is not None:
                    ends.append(self._text(step))
                texts.append(":".join(ends))
            else:
                texts.append(self._text(part))
        return ", ".join(texts)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        texts = [self._text(x) for x in args]
        if all(name.isidentifier() and not iskeyword(name) for name in kwargs):
            texts += [f"{name}={self._text(x)}" for name, x in kwargs.items()]
        else:
            texts.append(f"**{self._text(dict(kwargs))}")
        return ", ".join(texts)

    def _text(self, value: Any) -> str:  # noqa: PLR0911, C901 - one kind after another
        """Return an argument as Python code."""
        kind = type(value)
        if kind is Value:
            return f"x{value.number}"
        if kind is Held:
            return self._tensor(value.name)
        if kind is Device:
            self._uses_device = True
            return "device"
        if kind is Size:
            size: Size = value
            return size.text(self._size_names)
        if kind is ByMode:
            return self._by_mode(value)
        if kind is tuple:
            texts = [self._text(x) for x in value]
            return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
        if kind is list:
            return f"[{', '.join([self._text(x) for x in value])}]"
        if kind is dict:
            texts = [f"{self._text(key)}: {self._text(x)}" for key, x in value.items()]
            return f"{{{', '.join(texts)}}}"
        if kind is slice:
            ends = (value.start, value.stop, value.step)
            return f"slice({', '.join([self._text(x) for x in ends])})"
        if kind is torch.device:
            return f"torch.device({str(value)!r})"
        if kind is float and math.isfinite(value):
            return repr(value)
        if kind is bool or kind in _WRITTEN:
            return "..." if value is ... else repr(value)
        return self._named(value)

    def _by_mode(self, value: ByMode) -> str:
        """Return the code of an argument that depends on the training mode."""
        if value.training is True and value.evaluation is False:
            return "self.training"
        return (
            f"({self._text(value.training)} if self.training else {self._text(value.evaluation)})"
        )

    def _named(self, value: Any) -> str:
        """Return a name for an object that cannot be written as code; add the name to `names`."""
        for name, known in self.names.items():
            if known is value:
                return name
        wanted = _identifier(getattr(value, "__name__", type(value).__name__))
        name = f"{wanted}_{len(self.names)}"
        self.names[name] = value
        return name

    def _module(self, path: str) -> str:
        """Return code that finds a submodule by its path, such as `self.blocks._modules["0"]`."""
        text = "self"
        module: Any = self._layer
        for part in path.split(".") if path else ():
            text += f".{part}" if _is_attribute(module, part) else f"._modules[{part!r}]"
            module = module._modules[part]
        return text

    def _tensor(self, name: str) -> str:
        """Return code that finds a parameter or buffer by name, such as `self.linear.weight`."""
        path, _, last = name.rpartition(".")
        owner: Any = self._layer
        for part in path.split(".") if path else ():
            owner = owner._modules[part]
        text = self._module(path)
        if _is_attribute(owner, last):
            return f"{text}.{last}"
        kind = "_buffers" if last in owner._buffers else "_parameters"
        return f"{text}.{kind}[{last!r}]"


def function_from(
    name: str, function: str, text: str, names: Mapping[str, Any]
) -> Callable[..., Any]:
    """Make a function from the text of its code.

    The function gets a file name that no other function has, and tracebacks show its lines of code.

    Args:
        name: A text for the file name, such as the layer's name.
        function: The name of the function in the code.
        text: The code.
        names: Maps the names that the code uses to the objects for which they stand.
    """
    file = f"<{name} {next(_count)}>"
    scope = dict(names)
    exec(compile(text, file, "exec"), scope)
    found: Any = scope[function]
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    weakref.finalize(found, linecache.cache.pop, file, None).atexit = False
    return found  # type: ignore[no-any-return]


def _row(numbers: Sequence[int]) -> str:
    """Return the code of a tuple of numbered tensors: `x3, x4`, for example, or `(x3,)`."""
    names = [f"x{number}" for number in numbers]
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names) or "()"


def _pattern(result: Any) -> str:
    """Return the code to which a call's result is assigned, such as `x3, (x4, _)`.

    Args:
        result: The structure of the result, with the numbers of the tensors (`Call.result`).
    """
    if result is None:
        return "_"
    if isinstance(result, int):
        return f"x{result}"
    texts = [_pattern(each) for each in result]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _identifier(name: str) -> str:
    """Make a Python identifier from a name: `layer_12_layer1_0_conv2` from `12:layer1/0/conv2`."""
    letters = [c if c.isalnum() and c.isascii() else "_" for c in name]
    text = "".join(letters)
    return f"layer_{text}" if text[:1].isdigit() or iskeyword(text) or not text else text


def _variable(name: str) -> str:
    """Return the variable for a length called `name`: `name`, or `name_` if `name` is taken."""
    taken = name in ("self", "inputs", "device", "batch", "torch", "tensors_in", "slice", "_")
    return f"{name}_" if taken or iskeyword(name) or name[0] in "xX" else name


def _is_attribute(module: nn.Module, name: str) -> bool:
    """Return whether a submodule or tensor called `name` can be written as `module.name`.

    This is not possible if the module's class has another attribute of this name, for example.
    """
    usual = hasattr(type(module), name) or name in module.__dict__
    return name.isidentifier() and not iskeyword(name) and not usual


def _path(target: Any) -> str:
    """Return a function's full name in PyTorch, such as `torch.nn.functional.linear`.

    The result is "" if the function is not part of PyTorch, or cannot be found under its name.
    """
    name = getattr(target, "__qualname__", "")
    for path in (
        resolve_name(target),
        f"torch.{name}",
        f"{getattr(target, '__module__', None)}.{name}",
    ):
        first, *names = (path or "").split(".")
        found: Any = torch
        for each in names:
            found = getattr(found, each, None)
        if first == "torch" and names and found == target:
            return str(path)
    return ""
