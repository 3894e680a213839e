"""Decisions: each idea is measured against something that computes the same, and the table shows all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.decisions import IDEAS, Idea, Way, table
from benchmarks.pipelines import on_cpu
from reproduce.records.record import Record

WAYS = [way for idea in IDEAS for way in (idea.with_it, idea.without) if way is not None]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_gradients_of_plain_layers(way: Way) -> None:
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3)
    layers(x).sum().backward()
    expected = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    model = on_cpu(layers, [1, 2], way.engine, chunks=way.m, checkpoint=way.checkpoint)
    with way.undone():
        model(x).sum().backward()
    torch.testing.assert_close([p.grad for p in layers.parameters()], expected)


@pytest.mark.parametrize("idea", [idea for idea in IDEAS if idea.with_it is not None], ids=lambda idea: idea.what)
def test_with_and_without_differ_in_one_thing(idea: Idea) -> None:
    assert idea.with_it is not None and idea.without is not None
    (changed,) = (name for name, value in vars(idea.with_it).items() if getattr(idea.without, name) != value)
    assert replace(idea.without, **{changed: getattr(idea.with_it, changed)}) == idea.with_it


def test_ideas_without_a_figure_are_shown_too() -> None:
    text = table(Record("decisions", "", "measured", {}, []))
    assert all(idea.what in text and idea.outcome in text for idea in IDEAS)
