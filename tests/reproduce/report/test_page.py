"""Page: one file that needs nothing else, the same from the same records, in which every experiment is found."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from reproduce.records.record import Record, Result
from reproduce.report.page import page
from reproduce.report.subjects import FOLDERS, load_folders

from .conftest import RESULTS, TABLES

VOID = {"meta", "link", "br", "img", "hr", "input", "use", "path"}


class Reader(HTMLParser):
    """Check that elements are closed in order, and collect what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [found["id"]] if found.get("id") else []
        self.links += [str(found[name]) for name in ("href", "src") if name in found]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    return Reader(text)


def test_every_experiment_has_a_section(read: Reader) -> None:
    assert {*TABLES, "timelines", "machines", "others"} <= set(read.ids)


def test_links_stay_in_the_page_and_lead_somewhere(read: Reader) -> None:
    assert {link for link in read.links if not link.startswith("#")} == {"data:,"}
    assert {link.removeprefix("#") for link in read.links if link.startswith("#")} <= set(read.ids)
    assert not {"script", "img", "iframe"} & set(read.tags)


def test_nothing_is_asked_of_the_network(text: str) -> None:
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


def test_ids_are_unique(read: Reader) -> None:
    assert len(read.ids) == len(set(read.ids))


def test_it_is_made_the_same_each_time(paper: list[Record]) -> None:
    records = [record for record in paper if record.name in ("tg-amoebanetd-speed", "tg-unet-memory")]
    assert page(records) == page(records)


def test_it_stays_small(text: str) -> None:
    assert len(text) < 1_500_000


@pytest.mark.parametrize(
    "said",
    [
        "2 x a GPU, 16 GiB, 1500 MHz, 5000 MHz memory, 250 W, PCIe 3.0 x16",
        "driver 575.57",
        "0123456789ab, with changes",
        "0.50, 0.25, 1.00",
        "NVIDIA Tesla P40",
    ],
)
def test_the_machine_behind_every_number(said: str, text: str) -> None:
    assert said in text


def test_what_records_say_is_text_and_no_markup(text: str) -> None:
    assert "predicted (a&lt;b)" in text and "a<b" not in text
    results = [Result("x", "<b>", "published", values={"y": 1})]
    made = page([Record("x", "<script>alert(1)</script>", "published", {}, results)])
    assert "<script" not in made and "<b>" not in made


def test_no_measurement_yet(paper: list[Record]) -> None:
    text = page([record for record in paper if record.name == "tg-amoebanetd-speed"])
    assert "<strong>measured</strong> on a real machine: 0 records" in text
    Reader(text)


def test_what_is_committed_can_be_shown() -> None:
    records = load_folders(*(RESULTS / name for name in FOLDERS))
    shown = page(records)
    Reader(shown)
    experiments = {result.experiment for record in records for result in record.results if result.status == "measured"}
    assert experiments and all(f'<section id="{name}">' in shown for name in experiments)


def test_an_experiment_that_only_a_record_knows() -> None:
    results = [Result("new", "r", "measured", values={"throughput": 3.0})]
    assert '<section id="new">' in page([Record("bare", "T", "measured", {}, results)])
