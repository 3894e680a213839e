"""Page: one file that needs nothing else, the same from the same records, in which every experiment is found."""

from __future__ import annotations

from html.parser import HTMLParser

from reproduce.records.record import Record, Result
from reproduce.report.page import page
from reproduce.report.subjects import FOLDERS, load_folders

from .conftest import RESULTS, TABLES

VOID = {"meta", "link", "br", "img", "hr", "input", "use", "path"}


class Reader(HTMLParser):
    """Check that elements are closed in order, and collect tags, ids and links."""

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
        self.ids += [str(value) for name, value in attrs if name == "id" and value]
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_it_is_whole_and_asks_nothing_of_the_network(text: str) -> None:
    read = Reader(text)
    assert {*TABLES, "timelines", "machines", "others"} <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))
    assert {link for link in read.links if not link.startswith("#")} == {"data:,"}
    assert {link.removeprefix("#") for link in read.links if link.startswith("#")} <= set(read.ids)
    assert not {"script", "img", "iframe"} & set(read.tags)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
    assert len(text) < 1_500_000


def test_it_is_made_the_same_each_time(paper: list[Record]) -> None:
    records = [record for record in paper if record.name in ("tg-amoebanetd-speed", "tg-unet-memory")]
    assert page(records) == page(records)


def test_the_machine_behind_every_number(text: str) -> None:
    gpus = "2 x a GPU, 16 GiB, 1500 MHz, 5000 MHz memory, 250 W, PCIe 3.0 x16"
    for words in (gpus, "driver 575.57", "0123456789ab with changes", "0.50 0.25 1.00", "NVIDIA Tesla P40"):
        assert words in text


def test_what_records_say_is_text_and_no_markup(text: str) -> None:
    assert "predicted (a&lt;b)" in text and "a<b" not in text
    results = [Result("x", "<b>", "published", values={"y": 1})]
    made = page([Record("x", "<script>alert(1)</script>", "published", {}, results)])
    assert "<script" not in made and "<b>" not in made
    assert "<strong>measured</strong> on a real machine: 0 rows" in made


def test_what_is_committed_can_be_shown() -> None:
    records = load_folders(*(RESULTS / name for name in FOLDERS))
    text = page([*records, Record("bare", "T", "measured", {}, [Result("new", "r", "measured", values={"y": 3.0})])])
    Reader(text)
    experiments = {result.experiment for record in records for result in record.results if result.status == "measured"}
    assert experiments and all(f'<section id="{name}">' in text for name in [*experiments, "new"])
