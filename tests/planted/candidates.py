"""Generate possible faults of a file, by regular expressions on its lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .rows import Row

WAITS = "wait|wait_event|wait_stream|synchronize|join|arrive|hold|expect|admit|acquire"
STEPS = (
    r"clear|close|leave|record_\w+|_keep|check|release|cancel|unlink|announce|set\w*|manual_seed|remove|pop|append|add"
)
THING, END, NEAR = r"\*?[\w.]+(?:\([^()]*\)|\[\w+\])?", r"(?=[\]:)} ]|$)", "low|_|high|i|j|n|m|a|b"
PATTERNS = [
    ("version check", r"^(if|elif) .*(version|serial|self\._spent).*:$", r"\1 False:"),
    ("condition", r"\b(if|while) not (.+?)(?=:$| else )", r"\1 \2"),
    ("condition", r"\b(if|while) (?!not )(.+?)(?=:$| else )", r"\1 not (\2)"),
    ("condition", r"( for \w+ in .+ if )(.+)(?=[\])}])", r"\1not (\2)"),
    ("dropped wait", rf"^[\w.()]*\b({WAITS})\(.*\)$", "pass"),
    ("dropped step", rf"^[\w.()]*\b({STEPS})\(.*\)$|^\S+ [+-]= .*$", "pass"),
    ("first and last", rf"\breversed\(({THING})\)", r"\1"),
    ("term", rf" [+-] {THING}( \* {THING})?{END}", ""),
    ("arguments", r"\b(\w+)\.(\w+), \1\.(\w+)(?=[,)\]]| =|$)", r"\1.\3, \1.\2"),
    ("arguments", r"\b(\w+)\[(\w+)\], \1\[(\w+)\]", r"\1[\3], \1[\2]"),
    ("arguments", rf"(?<![\w.])({NEAR}), ({NEAR})(?![\w.(])", r"\2, \1"),
    ("arguments", rf"({THING}[gG]rads?\w*), ({THING})(?=[,)])", r"\2, \1"),
    ("left out", rf"\b(for [\w, ()]+ in )({THING}){END}", r"\1list(\2)[1:]"),
    ("left out", rf"\b(for [\w, ()]+ in )({THING}){END}", r"\1list(\2)[:-1]"),
]
# In each pair, either text may replace the other.
PAIRS = [("built-in", "min(", "max("), ("built-in", "any(", "all("), ("junction", " and ", " or ")]
PAIRS += [("off by one", " < ", " <= "), ("off by one", " > ", " >= "), ("sign", " + 1", " - 1")]
PAIRS += [("first and last", "[0]", "[-1]"), ("first and last", "[1:]", "[:-1]"), ("constant", "0.25", "0.75")]
PAIRS += [("constant", "=True", "=False"), ("constant", " = True", " = False"), ("swap", "first", "last")]
PAIRS += [("swap", "_inbound", "_outbound"), ("swap", "departure", "arrival"), ("swap", "departures", "arrivals")]
PAIRS += [("swap", "source", "target"), ("swap", "before", "after"), ("swap", "here", "there")]
for kind, *pair in PAIRS:
    for old, new in (pair, pair[::-1]):
        PATTERNS.append((kind, re.sub(r"^\b|\b$", r"\\b", re.escape(old)), new))
# A fault gets a special kind if patterns match its general kind, its line and its file.
SWAPS = r"swap|arguments|first and last"
NAMED = [
    ("wrong quartile", rf"{SWAPS}|built-in|constant|off by one|sign", r"quartile|quantile", r"^reproduce"),
    ("swapped gradients", SWAPS, r"\b\w*grads\b.*[,\[]|gradients", r"^torchgpipe/(?!plan)"),
    ("wrong stream", r"swap|arguments", r"stream|bound\b|here|departure|arrival", r"/(copy|cuda|graph)\.py"),
    ("seed drawn twice", r"term|dropped step", r"seed|_under_way", r"/(seeds|randomness|\w+/run|training)\.py"),
    ("row left out", r"left out", r"", r"^reproduce/(tables|report|numbers|cli|predict|regression)/"),
]


def faults(file: str, code: str) -> Iterator[Row]:
    """Yield the possible faults of a file, except in messages, signatures and functions that only GPUs run."""
    hidden: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        unseen = isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom))
        match node:
            case ast.FunctionDef(body=body, name=name):
                hidden |= {*range(node.lineno, body[0].lineno)}
                hard = re.search(r"torch\.cuda|pynvml", "\n".join(map(ast.unparse, body)))
                unseen = hard is not None or name in ("__repr__", "__str__")
            case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name("TYPE_CHECKING")):
                unseen = True
        if unseen and isinstance(node, ast.stmt):
            hidden |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    for at in sorted({*range(len(lines := code.splitlines()))} - {line - 1 for line in hidden}):
        line, mark, comment = lines[at].strip().partition("  # ")
        first = at
        while code.count(text := "\n".join(lines[first : at + 1]).lstrip()) > 1:
            first -= 1
        for kind, old, new in () if line.startswith("#") else PATTERNS:
            for match in re.finditer(old, line):
                before = line[: match.start()]
                named = [name for name, *of in NAMED if all(map(re.search, of, (kind, line, file)))]
                known = re.search(rf"\b{new}\b", code) if kind == "swap" else named or kind != "term"
                code_only = before.count('"') % 2 == 0 and not re.search("(strict|frozen|left)$", before)
                here = "synchronize" not in match[0] or re.search(r"/(copy|cuda|graph|wire)\.py", file)
                changed = before + match.expand(new) + line[match.end() :]
                if changed != line and known and code_only and here:
                    there = text.removesuffix(line + mark + comment) + changed
                    yield Row(file, [*named, kind][0], text, there + mark + comment)
