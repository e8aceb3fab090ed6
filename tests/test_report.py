from __future__ import annotations

import csv
import json

from experiments.report import COLUMNS, main, markdown, read_results, rows_of


def result(mode, peak, backend="eager", **extra):
    return {
        "model": "olmoe",
        "size": "tiny",
        "backend": backend,
        "mode": mode,
        "peak_memory_bytes": peak,
        "peak_expert_grad_bytes": 5_000_000,
        "step_time_ms": {"median": 12.34},
        "heldout_loss": 1.25,
        "steps": 3,
        "device_name": "a device",
        "versions": {"torch": "2"},
        **extra,
    }


def write(folder, name, value=None, error=None):
    run = folder / name
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("")
    if value is not None:
        (run / "result.json").write_text(json.dumps(value))
    if error is not None:
        (run / "error.txt").write_text(error)


def test_modes_stand_in_the_papers_order_and_the_saving_is_against_standard():
    rows = rows_of([result("sonar", 800), result("standard", 1000), result("in_backward_all", 750)])
    assert [row["mode"] for row in rows] == ["standard", "in_backward_all", "sonar"]
    assert [row["saved"] for row in rows] == ["0.0%", "25.0%", "20.0%"]
    assert rows[2]["gives up"] == "clipping on experts"
    assert rows[2]["ms a step"] == "12.3"


def test_settings_are_not_mixed():
    rows = rows_of([result("standard", 1000), result("sonar", 800, backend="grouped_mm"), result("sonar", 900)])
    assert [(row["backend"], row["saved"]) for row in rows] == [
        ("eager", "0.0%"),
        ("eager", "10.0%"),
        ("grouped_mm", ""),
    ]


def test_runs_that_differ_in_anything_else_are_compared_only_with_their_like(tmp_path):
    runs = [("standard", 1, 10), ("sonar", 1, 8), ("standard", 2, 100), ("sonar", 2, 80)]
    for index, (mode, layers, peak) in enumerate(runs):
        write(tmp_path, str(index), result(mode, peak))
        overrides = tmp_path / str(index) / ".hydra" / "overrides.yaml"
        overrides.write_text(f"- mode={mode}\n- model.num_layers={layers}\n- hydra.run.dir=x\n")
    rows = rows_of(read_results([tmp_path])[0])
    assert [(row["settings"], row["saved"]) for row in rows] == [
        ("model.num_layers=1", "0.0%"),
        ("model.num_layers=1", "20.0%"),
        ("model.num_layers=2", "0.0%"),
        ("model.num_layers=2", "20.0%"),
    ]
    assert "| settings |" in markdown(rows)


def test_values_that_were_not_measured_stay_empty():
    row = rows_of([result("sonar", None, heldout_loss=None, step_time_ms={"median": None})])[0]
    assert (row["peak GB"], row["held-out loss"], row["ms a step"]) == ("", "", "")


def test_report_writes_tables_and_names_runs_without_a_result(tmp_path, capsys):
    write(tmp_path, "0", result("standard", 10**9))
    write(tmp_path, "10", result("sonar", 8 * 10**8))
    write(tmp_path, "2", error="it failed")
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "summary.md").read_text()
    assert "| olmoe (tiny) | eager | sonar | 0.800 | 20.0% | 0.005 | 12.3 | 1.2500 | clipping on experts |" in text
    assert f"{tmp_path / '2'}: no result" in text
    assert "Measured on a device" in text
    rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert list(rows[0]) == list(COLUMNS)
    assert "sonar" in capsys.readouterr().out


def test_a_missing_folder_and_an_empty_one_are_not_a_success(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1


def test_markdown_has_one_line_a_row():
    rows = rows_of([result("standard", 1000)])
    assert len(markdown(rows).splitlines()) == 3


def test_a_broken_result_counts_as_none(tmp_path):
    write(tmp_path, "0")
    (tmp_path / "0" / "result.json").write_text("{")
    assert read_results([tmp_path]) == ([], [tmp_path / "0"])
