"""Faults that a file could have, by patterns over its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

from .rows import Row

WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "join", "arrive", "hold", "expect", "admit", "acquire"}
STEPS = {"clear", "close", "leave", "record_event", "record_stream", "_keep", "check", "release", "cancel", "unlink"}
STEPS |= {"announce", "detach_", "set_state", "manual_seed", "zero_", "remove", "discard", "pop", "restore", "stop"}
STEPS |= {"append", "add", "update", "setdefault", "copy_", "notify_all", "set", "flush", "kill", "terminate"}
OTHERS = ["first last", "before after", "inbound outbound", "_inbound _outbound", "here there"]
OTHERS += ["departure arrival", "source target", "departures arrivals"]
OTHER = {a: b for x, y in map(str.split, OTHERS) for a, b in ((x, y), (y, x))}

# A kind of the plan's, if the statement's text and the file are such, and the change one of these.
SWAPS = {"swap", "arguments", "first and last"}
NAMED = [
    ("wrong quartile", r"quartile|quantile", r"^reproduce", SWAPS | {"built-in", "constant", "off by one", "sign"}),
    ("swapped gradients", r"\b\w*grads\b|gradients", r"^torchgpipe/(?!plan)", SWAPS),
    ("wrong stream", r"stream|bound\b|here|departure|arrival", r"/(copy|cuda|graph)\.py", {"swap", "arguments"}),
    ("seed drawn twice", r"seed|_under_way", r"/(seeds|randomness|\w+/run|training)\.py", {"term", "dropped step"}),
    ("row left out", r"", r"^reproduce/(tables|report|numbers|cli|predict|regression)/", {"left out"}),
]
SIMULATED = "/(copy|cuda|graph|wire)\\.py"  # elsewhere only a GPU makes anybody wait for a device
UNSEEN = {"__repr__", "__str__"}
IDLE = {"strict", "daemon", "slots", "eq", "frozen", "kw_only", "repr", "exist_ok", "text", "check", "left"}


class Finder(ast.NodeVisitor):
    """Collect the faults of one file. Messages, types, and what only a GPU can run are passed over."""

    def __init__(self, file: str, text: str, skipped: str = "(?!)") -> None:
        self.file, self.bytes, self.skipped = file, text.encode(), re.compile(skipped)
        self.starts = [0, *accumulate(len(line) for line in self.bytes.splitlines(keepends=True))]
        self.function = ""
        self.rows: list[Row] = []
        self.statement: ast.stmt = ast.Pass()
        self.visit(ast.parse(text))

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt))
        end = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return self.starts[node.lineno - 1] + node.col_offset, end

    def source(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def fault(self, kind: str, node: ast.AST, new: str, last: ast.AST | None = None) -> None:
        """Write down that the text from `node` to `last` could be `new`, with lines around until it is unique."""
        (start, end), whole = self.span(node), self.bytes
        end = self.span(last)[1] if last else end
        first = whole.rfind(b"\n", 0, start) + 1
        first += len(whole[first:]) - len(whole[first:].lstrip(b" "))
        until = whole.find(b"\n", end)
        while whole.count(whole[first:until]) > 1:
            first = whole.rfind(b"\n", 0, first - 1) + 1
        old, changed = whole[first:until].decode(), (whole[first:start] + new.encode() + whole[end:until]).decode()
        head, part = ast.unparse(self.statement).splitlines()[0], whole[start:end].decode()
        named = [x for x in NAMED if kind in x[3] and re.search(x[1], part if "gradients" in x[0] else head)]
        kind = next((name for name, _, files, _ in named if re.search(files, self.file)), kind)
        if kind != "term" and old != changed and old.count("\n") < 4:
            self.rows.append(Row(self.file, kind, old, changed))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.FunctionDef):
            body = "\n".join(map(ast.unparse, node.body))
            if node.name in UNSEEN or re.search(r"torch\.cuda|pynvml", body) or self.skipped.search(body):
                return
            node.decorator_list, node.returns, self.function = [], None, body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.stmt):
            self.statement = node
        super().visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        around = self.statement
        for kind, changed, new, last in changes(node, self.source):
            if kind == "swap" and not re.search(rf"\b{re.sub(r'.*[.]', '', new)}\b", self.function):
                continue  # no such name
            if "synchronize" not in self.source(changed) or re.search(SIMULATED, self.file):
                self.fault(kind, changed, new, last)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name != "annotation":
                    self.visit(child)
                    self.statement = around


Change = tuple[str, ast.AST, str, ast.AST | None]


def changes(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Change]:
    """Yield what could be wrong at a node: kind, node, new text, and up to which node it goes."""
    match node:
        case ast.If(test=test, body=[first, *_]) if re.search(r"version|serial|self\._spent$", ast.unparse(test)):
            yield "version check", test, "True" if isinstance(first, ast.Return) else "False", None
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "condition", test, text(test)[4:] if text(test).startswith("not ") else f"not ({text(test)})", None
        case ast.BoolOp(op=op, values=values):
            other = " or " if isinstance(op, ast.And) else " and "
            whole = other.join(
                f"({text(v)})" if isinstance(v, (ast.BoolOp, ast.IfExp, ast.NamedExpr)) else text(v) for v in values
            )
            yield "junction", node, whole, None
        case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as op], comparators=[right]):
            other = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}[type(op)]
            yield "off by one", node, f"{text(left)} {other} {text(right)}", None
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if name in WAITS | STEPS:
            yield "dropped wait" if name in WAITS else "dropped step", node, "pass", None
        case ast.AugAssign():
            yield "dropped step", node, "pass", None
        case ast.Call(func=ast.Name(id=("min" | "max" | "any" | "all") as name) as called):
            yield "built-in", called, {"min": "max", "max": "min", "any": "all", "all": "any"}[name], None
        case ast.Name(id=name, ctx=ast.Load()) if name in OTHER:
            yield "swap", node, OTHER[name], None
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in OTHER:
            yield "swap", node, text(node).removesuffix(name) + OTHER[name], None
        case ast.Subscript(value=value, slice=index) if text(index) in ("0", "-1", "1:", ":-1"):
            other = {"0": "-1", "-1": "0", "1:": ":-1", ":-1": "1:"}[text(index)]
            yield "first and last", node, f"{text(value)}[{other}]", None
        case ast.Call(func=ast.Name(id="reversed"), args=[value]) if not isinstance(value, ast.GeneratorExp):
            yield "first and last", node, text(value), None
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            if isinstance(right, ast.Constant) and isinstance(right.value, int):
                yield "sign", node, f"{text(left)} {'-' if isinstance(op, ast.Add) else '+'} {text(right)}", None
            elif not isinstance(left, (ast.BoolOp, ast.IfExp)):
                yield "term", node, text(left), None
        case ast.keyword(arg=name, value=ast.Constant(value=bool(value)) as constant) if name not in IDLE:
            yield "constant", constant, str(not value), None
        case ast.Assign(value=ast.Constant(value=bool(value)) as constant):
            yield "constant", constant, str(not value), None
        case ast.keyword(value=ast.Constant(value=int(n)) as constant) if not isinstance(n, bool):
            yield "constant", constant, str(n + 1), None
        case ast.Constant(value=float(x)):
            yield "constant", node, str({0.25: 0.75, 0.75: 0.25}.get(x, x + 1)), None
        case ast.Tuple(elts=elements) | ast.Call(args=elements):
            for a, b in pairwise(elements):
                if alike(a, b) and not (isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Store)):
                    yield "arguments", a, f"{text(b)}, {text(a)}", b
    if isinstance(node, (ast.For, ast.comprehension)) and not isinstance(node.iter, ast.Tuple):
        for part in ("[1:]", "[:-1]"):
            yield "left out", node.iter, f"list({text(node.iter)}){part}", None
    for test in node.ifs if isinstance(node, ast.comprehension) else ():
        yield "condition", test, f"not ({text(test)})", None


def alike(a: ast.expr, b: ast.expr) -> bool:
    """Return whether two could be mixed up without an error: attributes or items of one thing, counterparts."""
    match a, b:
        case ast.Name(), ast.Name():
            return OTHER.get(a.id) == b.id or {a.id, b.id} <= {"low", "_", "high", "i", "j", "n", "m", "a", "b"}
        case (ast.Attribute(value=x), ast.Attribute(value=y)) | (ast.Subscript(value=x), ast.Subscript(value=y)):
            return ast.unparse(x) == ast.unparse(y)
        case _:
            return (
                isinstance(a, ast.Starred) and isinstance(b, ast.Starred) and "grad" in ast.unparse(a) + ast.unparse(b)
            )
