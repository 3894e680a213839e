"""Tests of the report, a single HTML file that needs no network.

The report must have every experiment and all results.
"""

import html
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.numbers.metrics import MARK
from reproduce.numbers.sources import side_of
from reproduce.records.record import SUCCESS, Record, Result
from reproduce.report.figure import VARIABLES
from reproduce.report.figures import _places, ideal
from reproduce.report.page import page
from reproduce.report.side_by_side import side_by_side
from reproduce.report.subjects import find_subjects, unpublished

from ..made import one_line, row
from .conftest import RUN, TABLES

VOID = {"meta", "link", "br", "img", "hr", "input", "use", "path"}
LINK = "tg-amoebanetd-speed/n2m4"


class Reader(HTMLParser):
    """A parser that collects a page's tags, ids and links, and checks that elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            elif name in ("href", "src"):
                self.links.append(str(value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_it_is_whole_and_asks_nothing_of_the_network(text: str, records: list[Record]) -> None:
    expected = {*TABLES, "timelines", "machines", "others"}
    for record in records:
        if record.kind == "published":
            expected.add(f"machine-{record.name}")
        for result in record.results:
            if result.status == "measured":
                expected.add(result.experiment)

    read = Reader(text)

    ids = set(read.ids)
    assert expected <= ids
    assert len(read.ids) == len(ids)
    for link in set(read.links) - {"data:,"}:
        assert link.startswith("#")
        assert link.removeprefix("#") in ids
    assert "data:," in read.links
    assert not {"script", "img", "iframe"} & set(read.tags)
    _, _, rest = text.partition("<style>")
    style, _, _ = rest.partition("</style>")
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert len(text) < 1_500_000


# For each section of the report, texts that it must have: lines of tables, and descriptions of
# figures. A `#` stands for a number of a committed run, such as 1.86 (1.84-1.94), which changes
# with the next run. Another test, `test_the_numbers_are_those_of_the_records`, checks these
# numbers.
SAYS: dict[str, list[str]] = {
    "amoebanet-speed": [
        "samples/s row | n | m | batch (published) | published | predicted (a<b) "
        "| measured (small, CUDA) | measured (small, CPU) | emulated (small, CUDA) "
        "| emulated (small, CPU) |",
        "| n2m1 | 2 | 1 | 96 | 26.7 | 28.4 | # | # | # | # |",
        "| n2m4 | 2 | 4 | 256 | 41.1 | 44.2 | # | # | # | # |",
        "| n2m32 | 2 | 32 | 1280 | 47.4 | 48.4 | not run | not run | # |",
        "| n8m4 | 8 | 4 | 480 | 70.1 | 76.0 | - | - | # | # |",
        "speed-up row | published | predicted (a<b) | measured (small, CUDA) | measured",
        "| n2m4 | 1.54 | 1.56 | # |",
        "utilization row | measured (small, CUDA) | measured (small, CPU) | emulated",
        "over that of the first row, n2m1",
        "Measured (small, CUDA) did other work than published, with other batch_size, "
        "micro_batch_size, D.",
        "Speed-up over the table's first row, 1 micro-batch. The dotted line is n·m/(n+m-1), the ",
        "Speed-up over the table's first row, 4 micro-batch",
        "Speed-up over the table's first row, 32 micro-batch",
        "Speed-up over n, 32 micro-batches: published n=2 1.77, n=4 2.71, n=8 4.95; "
        "predicted (a<b) n=2 1.70",
        "; emulated (small, CPU) n=2 #, n=4 #, n=8 #",
        "if only the bubble cost time published predicted (a<b) measured (small, CUDA) "
        "measured (small, CPU) emulated (small, CUDA)",
    ],
    "unet-speed": [
        "published n=1 1.00, n=1 0.86, n=2 1.25, n=4 2.35, n=8 3.11; predicted",
        "plain n=1 m=2 n=2 m=32",
        "| pipeline-1 | 1 | 2 | 80 | 24.5 | 22.5 | # | # |",
    ],
    "resnet101-speed": ["| pipeline-2 | 2 | 1667 | 25000 | 136 |"],
    "resnet101-accuracy": [
        "| pipeline-256 | 2 | 4 | 256 | 117 |",
        "| pipeline-256 | 21.99 ± 0.13 | # ± # |",
        "shows its rows plain, plain BN n2m4.",
    ],
    "amoebanet-memory": [
        "allocated memory row | n | m (published) | batch (published) | predicted (p40x8) |",
        "| pipeline-2 | 2 | 128 | 128 | # GiB | # MiB | # MiB |",
        "| pipeline-2 | 9.46 GiB | # MiB |",
        "reserved memory, measured (small, CUDA): baseline device 0 # MiB; ",
        "pipeline-2 device 0 # MiB, device 1 # MiB",
        "reserved memory, published: baseline model 0.91 GiB, activations unknown; "
        "pipeline-1 model 3.57 GiB",
        "0.91 + ? 4.48 9.46 18.7 31.5",
        "Peak of reserved memory, each device stacked on the one before; measured (small, CUDA).",
    ],
    "unet-memory": [
        "parameters row | published | measured (small, CPU) | counted (paper) |",
        "batch (published) | predicted (p40x8) |",
        "allocated memory, predicted (p40x8): baseline device 0 # GiB; ",
    ],
    "unet-ablation": [
        "dep-str-ptl | 4 | 8 | 128 | 58.5 | 49.7 | # |",
        "dep-str-ptl | 1.91 | # |",
        "dep-str-ptl | 75% | #% |",
        "Throughput, relative to the first row as components are added one by one.",
        "Utilization as components are added one by one.",
        "Reserved memory, relative to the first row as components are added one by one.",
        "Allocated memory, relative to the first row as components are added one by one.",
        "published baseline 1.00, dep-x-x 0.37",
        "dep-str-ptl 1.91",
    ],
    "timelines": [
        "naive model parallelism, n = 4, m = 1: the devices wait 75% of the time.",
        "the devices wait 43% of the time, and a step takes 44% of naive's.",
        "a step takes 42% of naive's.",  # 5 of 12 seconds
    ],
    "machines": [
        "2 x a GPU, 16 GiB, 1500 MHz, 5000 MHz memory, 250 W, PCIe 3.0 x16",
        "driver 575.57",
        "0123456789ab with changes",
        "0.50 0.25 1.00",
        "NVIDIA Tesla P40",
    ],
}


@pytest.mark.parametrize("name", SAYS)
def test_what_a_section_says(name: str, text: str) -> None:
    _, _, rest = text.partition(f'<section id="{name}">')
    section, _, _ = rest.partition("</section>")
    section = re.sub("</t[dh]>", " | ", section)
    section = re.sub(r'<svg[^>]* aria-label="([^"]*)"[^>]*>', r" \1 ", section)
    section = re.sub("<style.*?</style>|<[^>]*>", " ", section, flags=re.DOTALL)
    said = one_line(html.unescape(section))
    for words in SAYS[name]:
        pattern = re.escape(words).replace(r"\#", r"[\d.]+( \([\d.]+-[\d.]+\))?")
        assert re.search(pattern, said), words
    assert ("as components are added" in said) == (name == "unet-ablation")


def test_figures_fit_a_page(text: str) -> None:
    figures = re.findall("<svg .*?</svg>", text, re.DOTALL)
    assert len(figures) > 15
    for svg in figures:
        read = ElementTree.fromstring(svg)
        assert read.attrib["width"] == "360", "a phone's width"
        assert any(each.tag == "text" for each in read.iter()), "text is text"
        colors = set(re.findall(r"#[0-9a-f]{6}", svg))
        assert not colors, f"colours that do not follow the page: {colors}"
        used = set(re.findall(r"var\((--[a-z]+\d?)\)", svg))
        assert used
        assert used <= {*VARIABLES.values(), "--font"}
        for foreign in ("DejaVu", "<metadata", "http"):
            assert foreign not in svg
        ids = set(re.findall(r' id="([^"]+)"', svg))
        links = re.findall(r'href="#([^"]+)"', svg) + re.findall(r"url\(#([^)]+)\)", svg)
        assert set(links) <= ids
    # The speed-up if only the bubble cost time is the same as in the papers.
    assert ideal(1, 1) == ideal(8, 1) == 1
    assert ideal(8, 32) == 256 / 39


def test_own_runs_are_shown_and_what_is_left_out_is_named(
    records: list[Record], own: list[Record]
) -> None:
    """Check that the report shows a user's own run in a column, and names what it leaves out.

    If other programs disturbed a number of this run, a star must mark the number. The report leaves
    out an older run of the same experiment, and a file that cannot be read. If a run is published,
    it no longer counts as the user's own.
    """
    published = replace(records[0], name="a copy", kind="measured", run=own[1].run)
    made = one_line(re.sub("<[^>]*>", " ", page(records, own=own, skipped=["x.json: broken"])))

    assert "measured (small, CUDA, own)" in made
    for number in (r"\d\d\.\d\*", r"\d\.\d\d\*", r"\d\d%\*"):  # speed, speed-up, utilization
        assert re.search(f" {number}", made), number
    assert "my-old-run: measured (small, CUDA, own)" in made
    assert "*: disturbed, and so no evidence" in made
    assert "cannot be read: x.json: broken" in made
    assert unpublished(own, [published]) == [own[0]]


def test_what_records_say_is_text_and_no_markup(text: str) -> None:
    assert "predicted (a&lt;b)" in text
    assert "a<b" not in text
    published = Result("x", "<b>", "published", values={"y": 1})
    measured = Result("new", "r", "measured", values={"y": 3.0})

    made = page(
        [
            Record("x", "<script>alert(1)</script>", "published", {}, [published]),
            Record("bare", "T", "measured", {}, [measured]),
        ]
    )

    assert "<script" not in made
    assert "<b>" not in made
    assert '<section id="new">' in made
    assert "<strong>measured</strong> on a real machine: 1 row" in made


def run(started: str, *steps: int, state: Any = "finished", **changes: Any) -> Record:
    """Make the record of a run.

    Args:
        started: When the run started.
        steps: The number of steps of each row (configuration). A row with no steps has failed.
        state: The state of the run.
        changes: New values for fields of the results.
    """
    results = []
    for i, count in enumerate(steps):
        status = "measured" if count else "failed"
        fields = {"status": status, "published": LINK, **changes}
        results.append(row(f"x{i}", [1.0] * count, **fields))
    how = replace(RUN, started=started, state=state)
    return Record(f"run {started}", "T", "measured", {}, results, run=how)


# Runs, and the names of the runs that the report shows.
OF_2020 = run("2020", 1)
BOTH = ["run 2020", "run 2021"]


@pytest.mark.parametrize(
    ("runs", "best"),
    [
        ([run("2020", 1, 1), run("2021", 1, 1)], ["run 2021"]),
        ([run("2021", 1, 1), run("2020", 1, 1)], ["run 2021"]),
        # A newer run of a single row does not hide an older run of the whole table.
        ([run("2020", 1, 1), run("2021", 1)], ["run 2020"]),
        ([run("2020", 1, 1), run("2021", 1, 0)], ["run 2020"]),
        ([run("2020", 1, 1), run("2021", 1, 1, others=[0.2])], ["run 2020"]),
        ([run("2020", 1, 1, 1, others=[0.2]), run("2021", 1, 1, others=[0.2])], ["run 2020"]),
        ([OF_2020, run("2021", 1, 1, state="interrupted")], ["run 2020"]),
        ([run("2020", 0)], []),
        ([OF_2020, run("2021", 1, device="cuda")], BOTH),
        ([OF_2020, run("2021", 1, scale="paper")], BOTH),
        ([OF_2020, run("2021", 1, emulated=True, status="emulated")], BOTH),
        ([OF_2020, run("2021", 1, engine="ranks")], BOTH),
    ],
)
def test_one_rule_says_which_run_is_shown(runs: list[Record], best: list[str]) -> None:
    """Check which of several runs of an experiment the report shows.

    The report must show the runs that the command `compare` would choose. If a table has results of
    several runs, a note says so.
    """
    subjects = find_subjects(runs)
    side = side_of("A", "A", runs)

    shown: list[str] = []
    notes: list[str] = []
    for subject in subjects:
        shown += [source.record.name for source in subject.sources]
        notes += side_by_side(subject).notes
    assert shown == best
    names, machines, disturbed = set(), set(), False
    for entry in side.entries:
        if entry.result.status in SUCCESS:
            names.add(entry.record.name)
            machines.add((entry.result.scale, entry.result.device))
            disturbed = disturbed or entry.result.disturbed
    assert names >= set(best)
    beside = len(best) > 1 and len(machines) == 1
    text = " ".join(notes)
    assert ("Of different runs, which did not run in turn: " in text) == beside
    assert (MARK in text) == disturbed


def test_two_gpus_are_two_columns() -> None:
    """Check that runs on different GPUs are shown side by side, with the names of the GPUs."""
    runs = []
    for started, name in (("2020", "GPU A"), ("2021", "GPU A"), ("2022", "GPU B")):
        made = run(started, 1, device="cuda")
        gpus = [replace(gpu, name=name) for gpu in RUN.machine.gpus]
        machine = replace(RUN.machine, gpus=gpus)
        runs.append(replace(made, run=replace(RUN, started=started, machine=machine)))

    (subject,) = find_subjects(runs)

    labels = [source.label for source in subject.sources]
    assert labels == ["measured (small, CUDA, GPU A)", "measured (small, CUDA, GPU B)"]
    assert [source.record.name for source in subject.sources] == ["run 2021", "run 2022"]
    (alone,) = find_subjects(runs[1:2])
    assert [source.label for source in alone.sources] == ["measured (small, CUDA)"]


def test_figures_of_own_runs_have_the_rows_of_one_group() -> None:
    """Check that rows of other groups, which have other batch sizes, are in no figure."""
    made = run("2020", 1, 1)
    others = []
    for result in made.results:
        config = {**result.config, "group": "another"}
        others.append(replace(result, row=f"{result.row}/mb", config=config))
    results = [replace(r, config={**r.config, "group": "first"}) for r in made.results]
    (subject,) = find_subjects([replace(made, results=[*results, *others])])
    assert set(_places(subject)) == {result.row for result in results}
