"""Circumstances: what a benchmark's result was made under."""

from __future__ import annotations

import json

import torch

from benchmarks.circumstances import circumstances, told


def test_they_say_when_where_and_of_what() -> None:
    under = circumstances()
    assert under["torch"] == torch.__version__ and under["cores"] >= 1 and under["load"] >= 0
    assert under["cpu"] and under["when"].startswith("20")
    assert json.loads(json.dumps(under)) == under
    line = told(under)
    assert ", freed memory kept, load" in told({**under, "freed memory": "kept"})
    assert "NVIDIA X, " in told({**under, "gpu": "NVIDIA X"})
    assert "\n" not in line and under["cpu"] in line and under["when"][:10] in line
