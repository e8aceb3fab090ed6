"""Names, texts and files that a report was not made for: shown as they are, run by nobody, never a crash."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import memory, result, write_run

from experiments.report import _html, _markdown, main, report
from experiments.reporting.groups import group_runs
from experiments.reporting.runs import printable, read_runs
from experiments.reporting.tables import write_csv

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title><svg onload=alert(1)>",
    "'; & &lt; &#60;script&#62;",
    "a|b\n| c | d |\n\n# head\n[x](javascript:alert(1)) `code` ![i](http://x/y)",
    "\x1b]0;title\x07\x1b[31mred\x1b[2J",
    "[/] [bold] [link=http://x]",
    "$\\frac{ $ \\$ %",
    "\u202egnp.exe \u2066\u200b",
    "\ud83d half",
    "🦙 مرحبا",
    "x" * 3000,
    "=cmd|' /C calc'!A0",
]
TEXTS = ["model", "size", "backend", "mode", "precision", "device_name", "optimizer", "data", "loss", "expert_clip"]


class Page(HTMLParser):
    """Collects what a browser would make of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.text += data


OUR_TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "div", "table", "thead", "tbody", "tr", "th"}
OUR_TAGS |= {"td", "p", "figure", "img", "figcaption"}


def written(folder: Path) -> tuple[Page, str, list[dict[str, str]]]:
    """The report's three texts, without its figures."""
    runs, failures = read_runs([folder])
    groups = group_runs(runs)
    page = Page()
    page.feed(_html(groups, runs, failures, [], folder))
    write_csv(folder / "report.csv", groups, failures)
    lines = list(csv.DictReader((folder / "report.csv").read_text(encoding="utf-8").splitlines()))
    return page, _markdown(groups, runs, failures, [], folder), lines


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_others_is_shown_and_does_nothing(tmp_path, text):
    write_run(tmp_path / "0", result("standard"))
    for index, key in enumerate(TEXTS, 1):
        write_run(tmp_path / str(index), {**result("sonar"), key: text})
    write_run(tmp_path / "20", result("sonar", overrides=["mode=sonar", f"x={json.dumps(text)}"]))
    failed = write_run(tmp_path / "21", status={"exit_code": 1, "error": text}, overrides=[f"note={json.dumps(text)}"])
    (failed / "error.txt").write_text(text, encoding="utf-8", errors="surrogatepass")
    page, markdown, lines = written(tmp_path)
    assert page.tags <= OUR_TAGS
    assert page.addresses == page.handlers == []
    shown = printable(text)
    assert shown.strip().split("\n")[0] in page.text
    for line in markdown.splitlines():
        assert "<script" not in line
        assert "<img" not in line
        assert "<svg" not in line
        assert "](javascript" not in line.replace("\\]", "")
        assert not line.startswith("| c | d |")
    # A title of a table and of each group; no text makes one of its own.
    assert "\n# head" not in markdown
    for sign in ("\x1b", "\x07", "\u202e", "\ud83d"):
        assert sign not in page.text + markdown
    cells = [cell for line in lines for cell in line.values()]
    assert all(not cell.startswith(("=", "@", "\t", "\r")) for cell in cells)
    assert len(lines) == 13


def test_a_cell_that_a_spreadsheet_would_run_gets_an_apostrophe_and_numbers_do_not(tmp_path):
    write_run(tmp_path / "0", result("standard", heldout_loss=7.0))
    write_run(tmp_path / "1", result("sonar", overrides=["mode=sonar", "+model.overrides.x=1"]))
    write_run(tmp_path / "2", result("sonar", device_name="@SUM(A1)"))
    write_run(tmp_path / "3", result("sonar", heldout_loss=6.5))
    write_run(tmp_path / "4", status={"exit_code": -9, "error": "-1+cmd"})
    _, _, lines = written(tmp_path)
    by_folder = {Path(line["folder"]).name: line for line in lines}
    assert by_folder["1"]["settings"] == "'+model.overrides.x=1"
    assert by_folder["2"]["device_name"] == "'@SUM(A1)"
    assert by_folder["3"]["heldout_loss_gap"] == "-0.5"
    assert (by_folder["4"]["exit_code"], by_folder["4"]["reason"]) == ("-9", "'-1+cmd")


@pytest.mark.parametrize(
    "name", ["[/] [red]", "a <b> & 'c'", "²", "٣", "$x$", "bidi\u202e", "\udcff", "new\nline", "=1"]
)
def test_folders_of_any_name_are_reported(tmp_path, capsys, name):
    write_run(tmp_path / name / "0", result("standard"))
    write_run(tmp_path / name / "1")
    assert main([str(tmp_path / name), "--out", str(tmp_path / name / "out [/]")]) == 0
    assert "1 run, 1 without a result" in capsys.readouterr().out
    assert (tmp_path / name / "out [/]" / "report.html").is_file()


ODD = [None, [], {}, "x", 5, True, {"a": {"b": [1]}}, [1, "2"], "\ud83d", -1e308, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("key", [*result("sonar"), "skipped", "gives_up"])
def test_a_result_with_any_value_in_any_place_is_reported_or_listed(tmp_path, key):
    for index, value in enumerate(ODD, 1):
        folder = write_run(tmp_path / str(index), result("sonar"))
        (folder / "result.json").write_text(json.dumps({**result("sonar"), key: value}))
    write_run(tmp_path / "0", result("standard"))
    _, markdown, lines = written(tmp_path)
    assert len(lines) == len(ODD) + 1
    failed = [line for line in lines if line["status"] != "finished"]
    assert all("result.json has" in line["reason"] and key in line["reason"] for line in failed)
    assert markdown.startswith("# Sonar-MoE: ")


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"[" * 100_000, b"\xff\xfe", b"[]", b"5", b'{"mode": "sonar"'])
@pytest.mark.parametrize("name", ["result.json", "status.json", "memory.json", "losses.csv", "error.txt"])
def test_a_damaged_file_in_a_run_folder_costs_that_file_only(tmp_path, name, data):
    write_run(tmp_path / "0", result("standard"), losses=[7.0, 6.0])
    folder = write_run(tmp_path / "1", result("sonar"), losses=[7.0, 6.0], status={"exit_code": 0}, error="x")
    (folder / name).write_bytes(data)
    (folder / ".hydra" / "overrides.yaml").write_bytes(data)
    runs, failures = read_runs([tmp_path])
    assert len(runs) + len(failures) == 2
    assert [failure.reason for failure in failures] in (
        [],
        ["its result.json cannot be read"],
    )
    for run in runs:
        assert run.losses[2] in ([7.0, 6.0], [])
        assert run.memory is None or run.memory["timeline"]["phases"]


TIMELINES = [
    None,
    [],
    {},
    {"time_ms": []},
    {"time_ms": [1.0], "live_bytes": [1, 2]},
    {"live_bytes": ["a"] * 7},
    {"live_bytes": [None] * 7},
    {"phases": []},
    {"phases": [5]},
    {"phases": [{"phase": "forward"}]},
    {"phases": [{"phase": 5, "start_ms": 0.0, "end_ms": 1.0}]},
    {"peak_index": 99},
    {"peak_index": "3"},
]


def test_figures_are_drawn_of_odd_names_and_without_what_cannot_be_drawn(tmp_path):
    names = ["$\\frac{ 🦙", "x" * 3000, "a\nb, c", "\u202e<b>"]
    for index, name in enumerate(names):
        run = write_run(tmp_path / f"n{index}", {**result(name), "backend": name}, losses=[7.0, 6.5, 6.0])
        (run / "memory.json").write_text(json.dumps({"timeline": TIMELINES[index]}))
    for index, changed in enumerate(TIMELINES[3:]):
        run = write_run(tmp_path / f"s{index}", result("sonar", seed=index), losses=[7.0, 6.0])
        (run / "memory.json").write_text(json.dumps({"timeline": {**memory(10)["timeline"], **changed}}))
    write_run(tmp_path / "base", result("standard"), losses=[7.0, 6.0])
    report([tmp_path], tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} >= {"memory.png", "losses.png"}
