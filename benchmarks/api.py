"""Make the text of docs/api.md from the docstrings of the public classes and functions.

`python -m benchmarks.render` writes the page. The page is plain Markdown, so that it can be read
both in the repository and on the documentation's site.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any

RUN = ("forward", "step", "evaluate", "predict", "loss", "clip_grad_norm_")
"""The methods of pipelines."""
PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "Pipelines": {
        "torchgpipe.GPipe": (*RUN, "compile"),
        "torchgpipe.distributed.DistributedGPipe": (*RUN, "compile", "close"),
        "torchgpipe.distributed.RankFailed": (),
        "torchgpipe.MicroBatches": (),
        "torchgpipe.is_checkpointing": (),
        "torchgpipe.is_recomputing": (),
    },
    "Any model": {
        "torchgpipe.pipeline": (),
        "torchgpipe.distributed_pipeline": (),
        "torchgpipe.sequential": (),
        "torchgpipe.trace.Untraceable": (),
    },
    "Schedules": {
        "torchgpipe.schedules.make": (),
        "torchgpipe.schedules.draw": (),
        "torchgpipe.schedules.Schedule": (
            "load",
            "save",
            "replay",
            "micro_batches",
            "in_flight",
        ),
        "torchgpipe.schedules.Action": (),
        "torchgpipe.schedules.Timeline": ("tasks", "devices", "window", "bubble"),
    },
    "Skip connections": {
        "torchgpipe.skip.skippable": (),
        "torchgpipe.skip.stash": (),
        "torchgpipe.skip.pop": (),
        "torchgpipe.skip.Namespace": (),
        "torchgpipe.skip.verify_skippables": (),
    },
    "Balance and plan": {
        "torchgpipe.balance.balance_by_time": (),
        "torchgpipe.balance.balance_by_size": (),
        "torchgpipe.plan.plan": (),
        "torchgpipe.plan.Plan": (
            "on",
            "gpipe",
            "best",
            "balance",
            "chunks",
            "checkpoint",
            "schedule",
            "seconds",
            "gap",
            "bubble",
            "peaks",
            "bottleneck",
            "summary",
            "reason",
        ),
        "torchgpipe.plan.Hardware": ("seconds", "transfer", "room", "cpu"),
        "torchgpipe.plan.load_hardware": (),
        "torchgpipe.plan.hardware_names": (),
        "torchgpipe.plan.Impossible": (),
    },
    "State and time": {
        "torchgpipe.saves.Saves": ("save", "load"),
        "torchgpipe.timeline.record": (),
        "torchgpipe.timeline.Recording": ("row",),
        "torchgpipe.batchnorm.DeferredBatchNorm": ("convert_deferred_batch_norm", "commit"),
    },
}
"""By section of the page, what is public, and which methods and properties the page describes."""
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Warns|Yields):$")
OWN = re.compile(r"(\(\n?\s*)(?:self|cls)(?:,\s*|(?=\)))")
"""The first parameter of a method, which is not given in a call."""


def reference() -> str:
    """Return the page as Markdown: all sections, with their classes, functions and methods."""
    described: dict[Callable[..., Any], str] = {}
    parts = []
    for section, names in PUBLIC.items():
        parts.append(f"## {section}")
        for path, members in names.items():
            module, _, name = path.rpartition(".")
            public = getattr(import_module(module), name)
            parts += entry(path, public)
            if inspect.isclass(public):
                parts += members_of(public, members, described)
    return "\n\n".join(parts)


def entry(path: str, public: Any) -> Iterator[str]:
    """Yield pieces of Markdown: the heading, signature and docstring of a class or function."""
    yield f"### `{path}`"
    tree = parsed(public)
    documented: list[str] = []
    if isinstance(tree, ast.FunctionDef):
        yield code(header(public, tree.name))
    elif any(getattr(node, "name", "") == "__init__" for node in tree.body):
        signature = header(public.__init__, tree.name)
        yield code(signature.removesuffix(" -> None"))
    else:
        documented = documented_fields(tree)
        fields = fields_of(tree)
        if fields and not documented:  # a dataclass or a named tuple
            yield code(f"{tree.name}({', '.join(fields)})")
    yield markdown(inspect.getdoc(public) or "")
    if documented:
        yield "**Attributes**"
        yield "\n".join(documented)


def members_of(
    owner: type, members: Iterable[str], described: dict[Callable[..., Any], str]
) -> Iterator[str]:
    """Yield pieces of Markdown that describe methods and properties of a class.

    Args:
        owner: The class.
        members: The names of the methods and properties.
        described: The methods that the page has described so far, with links to them. This function
            adds the methods of this class to it. If several classes share a method, only the first
            class describes it, and the others have a link.
    """
    properties = []
    elsewhere = []
    for name in members:
        member = inspect.getattr_static(owner, name)
        if isinstance(member, (property, cached_property)):
            properties.append(f"- `{name}`: {within_list(inspect.getdoc(member) or '')}")
            continue
        function = getattr(member, "__func__", member)
        if function in described:
            elsewhere.append(described[function])
            continue
        heading = f"{owner.__name__}.{name}"
        anchor = heading.replace(".", "").lower()
        described[function] = f"[`{heading}`](#{anchor})"
        yield f"#### `{heading}`"
        yield code(header(function, name))
        yield markdown(inspect.getdoc(function) or "")
    if elsewhere:
        yield f"It also has {', '.join(elsewhere)}."
    if properties:
        yield f"**Properties of `{owner.__name__}`**"
        yield "\n".join(properties)


def parsed(public: Any) -> ast.ClassDef | ast.FunctionDef:
    """Return the syntax tree of a class or function from its source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(public))).body
    assert isinstance(tree, ast.ClassDef | ast.FunctionDef)
    return tree


def header(function: Callable[..., Any], shown: str) -> str:
    """Return the signature of a function as it is written in the code, without `self`.

    Args:
        function: The function.
        shown: The name to show in place of the function's name. For `__init__`, it is the name of
            the class.
    """
    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    lines = source.splitlines()[tree.lineno - 1 : tree.body[0].lineno - 1]
    without_comments = [re.sub(r"  # .*", "", line) for line in lines]
    text = "\n".join(without_comments).removeprefix(f"def {tree.name}").removesuffix(":")
    return shown + OWN.sub(r"\1", text)


def fields_of(tree: ast.ClassDef) -> list[str]:
    """Return the names and types of a class's public fields, such as `micro_batch: int`."""
    fields = [ast.unparse(node) for node in tree.body if isinstance(node, ast.AnnAssign)]
    return [field for field in fields if not field.startswith("_")]


def documented_fields(tree: ast.ClassDef) -> list[str]:
    """Return a list item for each field of a class, or `[]` if no field has a docstring."""
    lines = []
    documented = False
    for node, following in pairwise([*tree.body, ast.Pass()]):
        if not isinstance(node, ast.AnnAssign):
            continue
        line = f"- `{ast.unparse(node.target)}: {ast.unparse(node.annotation)}`"
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            documented = True
            line += f": {within_list(str(following.value.value))}"
        lines.append(line)
    return lines if documented else []


def markdown(docstring: str) -> str:
    """Turn a docstring into Markdown: sections such as `Args:` into lists, examples into code."""
    parts: list[str] = []
    lines = docstring.splitlines()
    while lines:
        indented = lines[0].startswith("    ")
        block = [lines.pop(0)]
        while lines and (not lines[0] or lines[0].startswith("    ") == indented):
            if SECTION.match(lines[0]):
                break
            block.append(lines.pop(0))
        text = textwrap.dedent("\n".join(block)).strip("\n")
        if indented:
            parts.append(code(text))
            continue
        section = SECTION.match(block[0])
        if section is None:
            parts.append(text)
            continue
        parts.append(f"**{section[1].replace('Args', 'Arguments')}**")
        body = []
        while lines and (not lines[0] or lines[0].startswith("    ")):
            body.append(lines.pop(0))
        text = textwrap.dedent("\n".join(body)).strip("\n")
        parts.append(text if section[1] in ("Returns", "Yields") else listed(text))
    return "\n\n".join(filter(None, parts))


def listed(section: str) -> str:
    """Turn the entries of a docstring's section, such as `name: text`, into a Markdown list."""
    lines = []
    for line in section.splitlines():
        if line[:1].strip():
            names, _, text = line.partition(":")
            quoted = ", ".join(f"`{name}`" for name in names.split(", "))
            lines.append(f"- {quoted}:{text}")
        else:
            lines.append(line[2:])
    return "\n".join(lines)


def within_list(docstring: str) -> str:
    """Turn a docstring into Markdown, indented so that it can stand within a list item."""
    text = markdown(inspect.cleandoc(docstring))
    return textwrap.indent(text, "  ").strip()


def code(text: str) -> str:
    return f"```python\n{text}\n```"
