"""The tables in docs/any-model.md, from the records of `benchmarks.any_model`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results" / "any-model"
PAGE = ROOT / "docs" / "any-model.md"
LISTS = ("torchvision", "transformers", "timm")


def write() -> None:
    """Write the page's tables anew."""
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def render(page: str) -> str:
    """Return the page with its tables as the records have them."""
    records = [(name, _load(f"{name}-ours"), _load(f"{name}-theirs")) for name in LISTS]
    page = _block(page, "summary", [_SUMMARY, *(_summary(*record) for record in records)])
    for name, ours, theirs in records:
        rows = [_row(model, found, theirs["models"].get(model)) for model, found in sorted(ours["models"].items())]
        page = _block(page, name, [_MODELS, *rows])
    return page


def _load(name: str) -> Any:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}, "versions": {}}


_SUMMARY = (
    "| list | models run | equal | else | of PyTorch's `pipeline()` equal | versions |\n"
    "| --- | ---: | ---: | ---: | ---: | --- |"
)
_MODELS = (
    "| model | layers | skips | seconds | result | PyTorch's `pipeline()` |\n| --- | ---: | ---: | ---: | --- | --- |"
)


def result(found: dict[str, Any]) -> str:
    """Return `equal`, or what went wrong first."""
    if "error" in found:
        return str(found["error"])
    return next((f"{key}: {said}" for key, said in found.items() if " " in key and said != "equal"), "equal")


def result_of_theirs(found: dict[str, Any]) -> str:
    """Return where the split that worked was, or what the first one ran into."""
    if "error" in found:
        return str(found["error"])
    return next((f"equal, split {key}" for key, said in found.items() if said == "equal"), next(iter(found.values())))


def _summary(name: str, ours: Any, theirs: Any) -> str:
    said = [result(found) for found in ours["models"].values()]
    said_too = [result_of_theirs(found) for found in theirs["models"].values()]
    equal, equal_too = said.count("equal"), sum(x.startswith("equal") for x in said_too)
    versions = ", ".join(f"{package} {number}" for package, number in ours["versions"].items())
    other = f"{equal_too} of {len(said_too)} tried" if said_too else "not run"
    return f"| {name} | {len(said)} of {ours.get('of', 0)} | {equal} | {len(said) - equal} | {other} | {versions} |"


def _row(name: str, ours: dict[str, Any], theirs: dict[str, Any] | None) -> str:
    other = "not run" if theirs is None else result_of_theirs(theirs)
    cells = [name, *(str(ours.get(key, "")) for key in ("layers", "skips", "seconds")), result(ours), other]
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) < 160 else f"{text[:157]}…"


def _block(page: str, name: str, lines: list[str]) -> str:
    pattern = rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{chr(10).join(lines)}\n{found[2]}", page, count=1, flags=re.S)


if __name__ == "__main__":
    write()
