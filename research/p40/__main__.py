"""Fit the P40's efficiencies: `python -m research.p40` writes fit.json beside this, and the hardware description."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from reproduce.records.record import write_atomically
from research.p40.compared import as_published, described, others, root_mean_square
from research.p40.fit import COMPUTE, MEMORY, errors, fitted, linear_shares
from research.p40.timings import SOURCES
from torchgpipe.plan.hardware import FOLDER, Hardware, load_hardware

RECORD = Path(__file__).with_name("fit.json")
DESCRIPTION = FOLDER / "p40x8.json"
THIS = "this model"


def main() -> None:
    """Write the record, and put its efficiencies into the description."""
    start = load_hardware(DESCRIPTION)
    node = rounded(fitted(start))
    (computing,) = COMPUTE
    efficiencies = {"compute": node.compute_efficiency["conv"], "memory": node.memory_efficiency["norm"]}
    description = json.loads(DESCRIPTION.read_text(encoding="utf-8"))
    for table, kinds, share in (("compute", computing, "compute"), ("memory", MEMORY, "memory")):
        for kind in kinds:
            description[f"{table}_efficiency"][kind]["value"] = efficiencies[share]
    write_atomically(DESCRIPTION, json.dumps(description, indent=2) + "\n")
    write_atomically(RECORD, json.dumps(record(node, efficiencies), indent=1) + "\n")
    print(f"written: {RECORD} and {DESCRIPTION}")


def record(node: Hardware, efficiencies: dict[str, float]) -> dict[str, Any]:
    """Return what there is to know about the fit."""
    found = errors(node)
    linear = {name: round(share, 3) for name, share in linear_shares(node).items()}
    models = {THIS: (node, len(efficiencies)), **others(node)}
    return {
        "command": "python -m research.p40",
        "efficiencies": efficiencies,
        "sources": {
            name: {"source": x.source, "card": x.card.name, "linear layers": linear[name]}
            for name, x in SOURCES.items()
        },
        "timings": [
            {
                "source": name,
                "model": model,
                "ms": list(SOURCES[name].steps[model]),
                "errors": [round(x, 4) for x in off],
            }
            for (name, model), off in found.items()
        ],
        "held out": {name: held_out(node, name) for name in dict.fromkeys(x.repository for x in SOURCES.values())},
        "models": {
            **{
                name: {"fitted": count, "timings": root_mean_square(x) if count else None, **described(x)}
                for name, (x, count) in models.items()
            },
            "GPipe's published speed-ups, on TPUs": {"fitted": 0, "timings": None, **as_published()},
        },
    }


def held_out(node: Hardware, repository: str) -> dict[str, Any]:
    """Return the efficiencies without a repository's timings, and the errors of these; but their linear layers'."""
    kept = {name: timings for name, timings in SOURCES.items() if timings.repository != repository}
    left_out = {name: timings for name, timings in SOURCES.items() if timings.repository == repository}
    other = fitted(node, kept)
    return {
        "compute": round(other.compute_efficiency["conv"], 3),
        "memory": round(other.memory_efficiency["norm"], 3),
        "timings": root_mean_square(other, left_out),
        "history": described(other)["history"],
    }


def rounded(node: Hardware) -> Hardware:
    """Return the node with three digits of each efficiency."""
    return replace(
        node,
        compute_efficiency={kind: round(share, 3) for kind, share in node.compute_efficiency.items()},
        memory_efficiency={kind: round(share, 3) for kind, share in node.memory_efficiency.items()},
    )


if __name__ == "__main__":
    main()
