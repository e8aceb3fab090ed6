from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import result, write_run

from experiments.report import MOST_PANELS, main, report
from experiments.reporting import page
from experiments.reporting.curves import _curves
from experiments.reporting.groups import Spread, group_runs, variant
from experiments.reporting.panels import looks_of
from experiments.reporting.paper import OLMOE_SONICMOE, paper_rows
from experiments.reporting.runs import read_runs
from experiments.reporting.tables import CSV_COLUMNS, escaped, legend_of, table_of
from lightning_sonar import MODES

FIGURES = {"memory.png", "live_memory.png", "step_time.png", "losses.png", "loss_gap.png"}


def groups_of(tmp_path: Path, *values: dict):
    for index, value in enumerate(values):
        write_run(tmp_path / str(index), value)
    return group_runs(read_runs([tmp_path])[0])


def test_modes_stand_in_the_papers_order_and_the_saving_is_against_standard(tmp_path):
    values = [result(mode, peak_memory_bytes=peak) for mode, peak in (("sonar", 800), ("standard", 1000))]
    (group,) = groups_of(tmp_path, *values, result("in_backward_all", peak_memory_bytes=750))
    assert [row.mode for row in group.rows] == ["standard", "in_backward_all", "sonar"]
    assert [row.saved for row in group.rows] == pytest.approx([0.0, 0.25, 0.2])
    assert [row.gives_up for row in group.rows] == ["nothing", "all clipping", "clipping on experts"]


def test_the_papers_five_columns_come_first_in_its_order(tmp_path):
    (group,) = groups_of(tmp_path, result("standard"), result("sonar"))
    head, rows = table_of(group)
    assert head[:5] == ["mode", "peak GB", "ms a step", "held-out loss", "gives up"]
    assert rows[1][:5] == ["sonar", "0.520", "250.0 (240-300)", "6.5000", "clipping on experts"]


def test_an_expert_clip_that_is_not_the_modes_own_is_a_row_of_its_own(tmp_path):
    (group,) = groups_of(tmp_path, result("sonar"), result("sonar", expert_clip="lagged"))
    assert [row.mode for row in group.rows] == ["sonar", "sonar, expert_clip=lagged"]
    assert variant(result("sonar", expert_clip="exact")) == "sonar_exact_clip"
    assert variant(result("a_mode_of_tomorrow")) == "a_mode_of_tomorrow"


def test_what_a_mode_does_otherwise_is_compared_with_standard_and_not_set_apart(tmp_path):
    (group,) = groups_of(
        tmp_path,
        result("standard", overrides=["mode=standard", "mode.accumulation=host"], accumulation="host"),
        *(
            result("sonar", expert_clip=c, overrides=["mode=sonar", f"mode.expert_clip={c}"])
            for c in ("none", "lagged")
        ),
        result("sonar", accumulation="host", overrides=["mode=sonar", "mode.accumulation=host"]),
        result("sonar", expert_state_device="cpu", overrides=["mode=sonar", "++mode.expert_state_device=cpu"]),
    )
    names = ["standard", "sonar", "sonar, accumulation=host", "sonar, expert_clip=lagged"]
    assert [row.mode for row in group.rows] == [*names, "sonar, expert_state_device=cpu"]
    assert group.base == "standard"
    assert all(row.saved == pytest.approx(0.2052, abs=1e-4) for row in group.rows[1:])


def test_a_value_that_a_column_shows_sets_no_runs_apart_if_it_was_typed(tmp_path):
    typed = ["mode=sonar", "trainer.precision=bf16-true", "data.batch_size=2", "+trainer.max_steps=30"]
    (group,) = groups_of(tmp_path, result("standard"), result("sonar", overrides=typed))
    assert group.title == "olmoe (tiny), grouped_mm, 2 x 64 tokens, bf16-true"


def test_runs_that_differ_in_anything_else_are_compared_only_with_their_like(tmp_path):
    values = [
        result(
            mode, overrides=[f"mode={mode}", f"model.num_layers={layers}", "hydra.run.dir=x"], peak_memory_bytes=peak
        )
        for mode, layers, peak in (("standard", 1, 10), ("sonar", 1, 8), ("standard", 2, 100), ("sonar", 2, 80))
    ]
    groups = groups_of(tmp_path, *values, result("sonar", backend="eager", overrides=["model.num_layers=2"]))
    assert [[row.saved for row in group.rows] for group in groups] == [
        pytest.approx([0.0, 0.2]),
        pytest.approx([0.0, 0.2]),
        [None],
    ]
    assert [group.title.split(", ")[-1] for group in groups][:2] == ["model.num_layers=1", "model.num_layers=2"]
    assert groups[2].base is None


@pytest.mark.parametrize(
    "changed",
    [
        *({"size": "full"}, {"params_total": 1}, {"loss": "chunked"}, {"optimizer": "AdamW"}, {"data": "alpaca"}),
        *({"precision": "32"}, {"batch_size": 4}, {"seq_len": 128}, {"steps": 31}, {"ranks": 2}, {"device_name": "x"}),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_one_figure_of_the_setting_alone_sets_runs_apart(tmp_path, changed):
    groups = groups_of(tmp_path, result("standard"), result("sonar", **changed))
    assert [[row.saved for row in group.rows] for group in groups] == [[0.0], [None]]


def test_what_all_runs_have_in_common_is_not_in_the_title(tmp_path):
    values = [result("sonar", overrides=["experiment=paper_small", "seed=1"]), result("sonar", backend="eager")]
    values[1]["overrides"] = ["experiment=paper_small"]
    titles = [group.title for group in groups_of(tmp_path, *values)]
    assert titles == [f"olmoe (tiny), {name}, 2 x 64 tokens, bf16-true" for name in ("grouped_mm", "eager")]


def test_loss_gaps_are_taken_seed_by_seed(tmp_path):
    losses = {("standard", 0): 6.0, ("standard", 1): 7.0, ("sonar", 0): 6.001, ("sonar", 1): 7.003, ("sonar", 2): 9.0}
    values = [result(mode, seed=seed, heldout_loss=loss) for (mode, seed), loss in losses.items()]
    (group,) = groups_of(tmp_path, *values)
    gap = group.rows[1].gap
    assert gap is not None
    assert (gap.middle, gap.low, gap.high, gap.count) == pytest.approx((0.002, 0.001, 0.003, 2))
    head, rows = table_of(group)
    assert rows[1][head.index("loss gap")] == "+0.0020 (+0.0010 to +0.0030)"
    assert rows[1][head.index("seeds")] == "0, 1, 2"


def test_the_papers_figures_stand_beside_ours_only_in_its_setting(tmp_path):
    ours = {"size": "full", "backend": "sonicmoe", "seq_len": 256, "data": "alpaca", "steps": 2000}
    groups = groups_of(tmp_path, *(result(mode, **ours) for mode in MODES))
    head, rows = table_of(groups[0])
    assert head[:7] == ["mode", "peak GB", "paper: GB", "ms a step", "paper: ms", "held-out loss", "paper: loss"]
    assert [row[2] for row in rows] == ["55.55", "55.55", "43.35", "43.57", "43.57", ""]
    assert rows[3][4] == "116.1"
    assert rows[3][6] == "1.2596"
    assert any("19 to 22%" in line for line in legend_of(groups))
    same = result("sonar", **ours)
    for other in ({"backend": "grouped_mm"}, {"batch_size": 4}, {"size": "tiny"}, {"model": "granite"}, {"ranks": 2}):
        assert paper_rows({**same, **other}) == {}
    for other in ({"optimizer": "bnb_adamw8bit"}, {"accumulate_grad_batches": 4}, {"loss": "chunked"}):
        assert paper_rows({**same, **other}) == {}
    for setting in (
        "model.checkpointing=true",
        "+model.overrides.num_experts=8",
        "data.packing=true",
        "model.num_layers=2",
    ):
        assert paper_rows(same, [setting]) == {}
    assert paper_rows(same, ["experiment=paper", "data=alpaca", "callbacks=checkpoint"]) == OLMOE_SONICMOE
    assert paper_rows(same) == OLMOE_SONICMOE
    assert paper_rows({**same, "steps": 100})["sonar"].heldout_loss is None


def test_figures_that_were_not_measured_stay_empty(tmp_path):
    bare = result("sonar", peak_memory_bytes=None, memory_split=None, heldout_loss=None, step_time_ms={"median": None})
    (group,) = groups_of(tmp_path, {**bare, "skipped_steps": 3})
    assert table_of(group)[1][0][:4] == ["sonar", "", "", ""]
    assert "sonar, seed 0: 3 skipped steps." in group.notes
    assert "sonar, seed 0: the held-out loss was not finite or not measured." in group.notes
    report([tmp_path], tmp_path / "out")
    assert list((tmp_path / "out" / "figures").glob("*")) == []


@pytest.fixture
def sweep(tmp_path):
    """Two models, two seeds, three modes, and three folders without a result."""
    index = 0
    for model in ("olmoe", "granite"):
        for seed in (0, 1):
            for mode in ("standard", "standard_no_expert_clip", "sonar"):
                shift = 0.0 if mode == "standard" else 0.01
                value = result(mode, model=model, seed=seed, heldout_loss=6.5 + shift)
                write_run(tmp_path / str(index), value, losses=[8 - step / 20 + shift for step in range(30)])
                index += 1
    status = {"exit_code": 3, "seconds": 1.0, "error": "ran <b>out</b> | of memory"}
    write_run(tmp_path / "100", status=status, overrides=["mode=sonar", "hydra.verbose=true"])
    write_run(tmp_path / "101")
    write_run(tmp_path / "102")
    (tmp_path / "102" / "result.json").write_text("{")
    return tmp_path


class Page(HTMLParser):
    """Collects what a browser would show and fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_a_report_holds_tables_figures_and_what_failed(sweep, capsys):
    assert main([str(sweep)]) == 0
    assert {path.name for path in (sweep / "figures").iterdir()} == FIGURES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (sweep / "figures").iterdir())
    text = (sweep / "report.md").read_text()
    assert text.startswith("# Sonar-MoE: 12 runs, 3 without a result")
    assert "| 3 | ran &lt;b>out&lt;/b> \\| of memory | mode=sonar | 100 |" in text
    assert "|  | interrupted, or still running |  | 101 |" in text
    assert "its result.json cannot be read" in text
    assert set(re.findall(r"\]\(figures/(.*)\)", text)) == FIGURES
    assert "Measured on a device (cpu), python 3.11, torch 2.13.0." in text
    shown = capsys.readouterr().out
    assert "no result (exit code 3)" in shown
    assert "ran <b>out</b> | of memory" in shown


def test_the_page_is_self_contained_and_escapes_what_is_foreign(sweep):
    (sweep / "0" / "result.json").write_text(
        json.dumps(result("<script>alert(1)</script>", device_name='"><img src=x'))
    )
    report([sweep], sweep)
    parsed = Page()
    parsed.feed((sweep / "report.html").read_text())
    assert "script" not in parsed.tags
    assert parsed.tags.count("img") == 5
    assert all(address.startswith("data:image/png;base64,") for address in parsed.addresses)
    assert "<script>alert(1)</script>" in parsed.text
    assert "ran <b>out</b> | of memory" in parsed.text


def test_figures_in_brackets_do_not_break_and_words_stay_as_they_are():
    text = page.table(["mode", "ms a step", "loss gap"], [["a-1 to 2-b", "250.0 (240-300)", "-0.01 (-0.02 to +0.01)"]])
    assert ">a-1 to 2-b<" in text
    assert ">250.0 (240\u2011300)<" in text
    assert ">-0.01 (-0.02\u00a0to\u00a0+0.01)<" in text


def test_the_csv_has_a_line_a_run_in_plain_units(sweep):
    report([sweep], sweep)
    rows = list(csv.DictReader((sweep / "report.csv").read_text().splitlines()))
    assert list(rows[0]) == list(CSV_COLUMNS)
    assert [row["status"] for row in rows].count("finished") == 12
    assert [row["status"] for row in rows[12:]] == ["failed", "incomplete", "incomplete"]
    sonar = next(row for row in rows if row["mode"] == "sonar")
    assert int(sonar["peak_memory_bytes"]) == 520_044_108
    assert int(sonar["expert_gradients_bytes"]) == 16_777_216
    assert float(sonar["heldout_loss_gap"]) == pytest.approx(0.01)
    assert float(sonar["saved"]) == pytest.approx(0.2052, abs=1e-4)


def test_folders_are_read_once_and_may_be_single_runs(sweep, tmp_path):
    runs, failures = read_runs([sweep / "3", sweep, sweep / "10"])
    assert [run.folder.name for run in runs][:3] == ["3", "0", "1"]
    assert (len(runs), len(failures)) == (12, 3)


def test_a_result_alone_is_a_run(tmp_path):
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "result.json").write_text(json.dumps(result("sonar")))
    assert len(read_runs([tmp_path])[0]) == 1


def test_a_result_of_another_program_is_no_run(tmp_path):
    (tmp_path / "bench_peers").mkdir()
    (tmp_path / "bench_peers" / "result.json").write_text(json.dumps({"rows": {}, "ms": {}, "steps": 8}))
    write_run(tmp_path / "0", result("sonar"))
    runs, failures = read_runs([tmp_path])
    assert (len(runs), failures) == (1, [])


def _later(folder: Path, first: int) -> None:
    """As a run that went on from a checkpoint writes its losses."""
    head, *lines = (folder / "losses.csv").read_text().splitlines()
    (folder / "losses.csv").write_text("\n".join([head, *lines[first - 1 :]]) + "\n")


def test_losses_of_several_runs_are_put_together_batch_by_batch(tmp_path):
    first = write_run(tmp_path / "0", result("sonar", seed=0), losses=[8.0, 7.0, 6.0, 5.0])
    resumed = write_run(tmp_path / "1", result("sonar", seed=1), losses=[0.0, 0.0, 6.2, 5.2])
    _later(resumed, 3)
    gap = write_run(tmp_path / "2", result("sonar", seed=2), losses=[8.0, float("nan"), 6.4, 5.4])
    ((names, curve),) = _curves(group_runs(read_runs([first, resumed, gap])[0])[0].rows)
    assert (names, curve.places, curve.of) == (["sonar"], [3, 4], " (3 seeds)")
    assert curve.middle == pytest.approx([6.2, 5.2])
    assert (curve.low, curve.high) == ([6.0, 5.0], [6.4, 5.4])


def test_the_same_seed_twice_is_two_runs_and_runs_without_a_common_batch_are_not_mixed(tmp_path):
    for name in ("0", "1"):
        write_run(tmp_path / "twice" / name, result("sonar"), losses=[8.0, 7.0])
    ((_, curve),) = _curves(group_runs(read_runs([tmp_path / "twice"])[0])[0].rows)
    assert curve.of == " (2 runs)"
    write_run(tmp_path / "apart" / "0", result("sonar"), losses=[8.0, 7.0, 6.0])
    _later(write_run(tmp_path / "apart" / "1", result("sonar", seed=1), losses=[0.0, 0.0, 0.0, 5.0]), 4)
    ((_, curve),) = _curves(group_runs(read_runs([tmp_path / "apart"])[0])[0].rows)
    assert (curve.middle, curve.of) == ([8.0, 7.0, 6.0], "")


def test_a_median_outside_its_percentiles_is_drawn(tmp_path):
    write_run(tmp_path / "0", result("sonar", step_time_ms={"median": 200.0, "p10": 230.0, "p90": 190.0}))
    (group,) = report([tmp_path], tmp_path / "out")
    assert group.rows[0].step_ms == Spread(200.0, 200.0, 200.0, 1)


def test_a_search_over_many_values_gets_tables_for_all_and_figures_for_some(tmp_path):
    for index in range(MOST_PANELS + 2):
        write_run(tmp_path / str(index), result("sonar", overrides=["mode=sonar", f"optimizer.lr={index}"]))
    groups = report([tmp_path], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert len(groups) == text.count("| sonar |") == MOST_PANELS + 2
    assert f"Only the first {MOST_PANELS} of {MOST_PANELS + 2} settings are shown." in text


def test_modes_of_one_figure_look_different():
    modes = [*MODES, "sonar, expert_clip=lagged", "sonar, expert_clip=per_tensor", "sonar, accumulation=host"]
    looks = looks_of(modes)
    for key in ("color", "marker"):
        assert len({look[key] for look in looks}) == len(modes)
    assert len({(look["linestyle"], look["marker"]) for look in looks}) == len(modes)
    assert looks_of(["sonar"]) == [looks[list(MODES).index("sonar")]]


def test_losses_come_from_metrics_where_there_is_nothing_better(tmp_path):
    run = write_run(tmp_path / "0", result("sonar"))
    (run / "metrics.csv").write_text("step,train_loss,heldout_loss\n4,8.0,\n9,7.5,\n14,nan,\n14,,6.9\n")
    assert read_runs([tmp_path])[0][0].losses == ("step", [5, 10], [8.0, 7.5])


def test_a_figure_of_an_earlier_report_does_not_stay(sweep, tmp_path):
    out = tmp_path / "out"
    report([sweep], out)
    report([sweep / "101"], out)
    assert list((out / "figures").iterdir()) == []


def test_a_missing_folder_and_an_empty_one_are_not_a_success(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is not a folder. Name run folders" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "Written: " in (said := capsys.readouterr().out)
    assert "figures/" not in said
    (tmp_path / "file").touch()
    assert main([str(tmp_path), "--out", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_result_of_another_shape_is_listed_not_read(tmp_path):
    write_run(tmp_path / "0", {"mode": "sonar"})
    runs, (failure,) = read_runs([tmp_path])
    assert runs == []
    assert failure.reason == "its result.json has no model, size, backend"


def test_markdown_shows_text_as_it_is():
    assert escaped("a|b\n`c` <d> [e]") == "a\\|b \\`c\\` &lt;d> \\[e\\]"


def test_losses_that_are_not_finite_are_left_out(tmp_path):
    write_run(tmp_path / "0", result("sonar"), losses=[8.0, float("inf"), float("nan"), -float("inf"), 7.0])
    assert read_runs([tmp_path])[0][0].losses == ("batch", [1, 5], [8.0, 7.0])
