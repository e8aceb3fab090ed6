"""The peers' benchmark: its checks on a toy, what it says of goals, its table, and rows of what cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from experiments import bench_peers
from experiments.peers import BASELINE, OURS, PEERS
from experiments.peers import checks as peer_checks
from experiments.peers import table as peer_table
from experiments.peers.base import BF16_MOMENTS, CannotRunError, Observer, Plan
from experiments.peers.in_hooks import TutorialHooks

ROOT = Path(__file__).parent.parent

RIGHT = {"clipping": "yes", "scheduler": "yes", "resume": "yes", "accumulation": "yes"}
WITHOUT_PACKAGES = {
    "lightning": RIGHT,
    "tutorial": RIGHT | {"clipping": "no (clips nothing)", "accumulation": "no (differs"},
    "standard": RIGHT,
    "in_backward_all": RIGHT | {"clipping": "no (raises ValueError)"},
    "sonar": RIGHT | {"clipping": "dense only"},
    "sonar_exact_clip": RIGHT,
}


@pytest.mark.parametrize("name", WITHOUT_PACKAGES)
def test_the_checks_find_what_is_right_under_a_peer(name):
    found = peer_checks.check(PEERS[name])
    for column, cell in WITHOUT_PACKAGES[name].items():
        assert found[column]["cell"].startswith(cell), found
        if cell in ("yes", "dense only"):
            assert found[column]["gap"] == 0, f"{name}, {column}: no longer bitwise"


def test_the_checks_can_tell_right_from_wrong():
    recipe = PEERS[BASELINE]
    with peer_checks.deterministic():
        start = peer_checks.weights(peer_checks.toy())
        plan = peer_checks._plan(peer_checks.CONSTANT, max_norm=peer_checks.MAX_NORM)
        clipped = {scope: peer_checks.reference(recipe, plan, scope) for scope in ("all", "dense", "none")}
        changing = peer_checks.reference(recipe, peer_checks._plan(peer_checks.CHANGING))
        # The mean of two microbatches, and the second alone.
        both = peer_checks._plan(peer_checks.CONSTANT, microbatches=2)
        one = Plan([step[1:] for step in both.steps], both.lrs)
        parts = [peer_checks.reference(recipe, wanted) for wanted in (both, one)]
    pairs = [(clipped["all"], clipped["dense"]), (clipped["all"], clipped["none"]), (clipped["dense"], clipped["none"])]
    for first, second in (*pairs, (changing, clipped["none"]), tuple(parts)):
        assert peer_checks.gap(first, second, start) > 1000 * peer_checks.SAME


class _LosesItsOptimizer(TutorialHooks):
    def begin(self, model, plan):
        run = super().begin(model, plan)
        # Nothing of the optimizers is saved or scheduled.
        run.optimizers = []
        return run


def test_a_peer_that_saves_no_optimizer_and_hears_no_scheduler_is_found_out():
    found = peer_checks.check(_LosesItsOptimizer())
    assert found["resume"]["cell"].startswith("no (differs")
    assert found["scheduler"]["cell"].startswith("no (differs")


def test_a_watched_step_counts_states_and_gradients_that_were_there_before():
    model = torch.nn.Linear(8, 8, bias=False)
    model.weight.grad = torch.zeros(8, 8)
    state, batch = torch.zeros(16), {"input_ids": torch.zeros(4)}
    observer = Observer(watch=1)
    for _ in range(2):
        observer.begin(model, [state], [batch])
        torch.zeros(32)
        observer.end()
    assert observer.peak_bytes == 4 * (64 + 64 + 16 + 4 + 32)
    assert len(observer.ms) == 2


def _row(name: str, peak: float, ratio: float, least: float | None = None, **more):
    row = {"label": PEERS[name].label, "state": PEERS[name].state, "note": "", "peak_bytes": int(peak * 1e6)}
    row |= {"ratio": ratio, "least": least or ratio, "greatest": ratio, "heldout_loss": 4.0}
    return row | {"checks": {column: {"cell": "yes", "gap": 0.0} for column in peer_checks.CHECKS}} | more


ROWS = {
    BASELINE: _row(BASELINE, 100, 1.0),
    "tutorial": _row("tutorial", 80, 0.95),
    "in_backward_all": _row("in_backward_all", 80, 0.96, least=0.94),
    "sonar": _row("sonar", 81, 0.9),
    "lora": _row("lora", 60, 0.5),
}


def _verdicts(rows):
    return {item["goal"]: (item["verdict"], item["figures"]) for item in peer_table.verdicts(rows)}


def test_each_peer_of_the_same_state_is_judged_by_peak_and_by_step_time():
    found = _verdicts(ROWS)
    assert found["tutorial is not below our peak"] == ("met", "80.0 MB; in_backward_all 80.0 MB; sonar 81.0 MB")
    speed = found["tutorial is not faster at the same peak"]
    assert speed == ("met within the spread", "step time 0.950; in_backward_all 0.960 (0.940 to 0.960)")
    assert found[f"{BASELINE} is not faster at the same peak"][0] == "met"
    assert not any(goal.startswith("lora") for goal in found), "adapters keep another state"


def test_a_peers_optimizer_is_compared_with_itself_where_we_have_it():
    low = {"torchao8bit": _row("torchao8bit", 70, 9), "sonar_bnb8bit": _row("sonar_bnb8bit", 50, 7)}
    assert _verdicts(ROWS | low)["torchao8bit is not below our peak"] == ("met", "70.0 MB; sonar_bnb8bit 50.0 MB")
    found = _verdicts(ROWS | low | {"sonar_ao8bit": _row("sonar_ao8bit", 75, 8)})
    assert found["torchao8bit is not below our peak"] == ("missed", "70.0 MB; sonar_ao8bit 75.0 MB")


def test_a_lower_peak_or_a_faster_step_of_a_peer_is_a_missed_goal():
    lower = _verdicts(ROWS | {"tutorial": _row("tutorial", 79.9, 0.99)})
    assert lower["tutorial is not below our peak"][0] == "missed"
    assert lower["tutorial is not faster at the same peak"][0] == "met"
    assert _verdicts(ROWS | {"tutorial": _row("tutorial", 80, 0.93)})["tutorial is not faster at the same peak"][0] == (
        "missed"
    )
    far = _verdicts(ROWS | {"tutorial": _row("tutorial", 70, 2.0)})["tutorial is not faster at the same peak"]
    assert far == ("missed", "none of ours has so low a peak")


RESULT = {
    "toy": False,
    "parameters": 118e6,
    "start_loss": 5.0,
    "threads": 2,
    "batch_size": 2,
    "seq_len": 64,
    "max_norm": 1.0,
    "rounds": 5,
    "steps": 8,
    "quality_steps": 200,
    "pretrain_steps": 200,
    "lr": 3e-4,
    "command": "python experiments/bench_peers.py",
    "processor": "a processor",
    "versions": {"torch": "2.10"},
}


def test_the_page_has_every_peer_its_figures_and_what_happened(capsys):
    raised = {"clipping": {"cell": "no (raises ValueError)", "gap": None, "said": "nothing to clip."}}
    rows = {
        **ROWS,
        "sonar": _row("sonar", 81, 0.9, checks=ROWS["sonar"]["checks"] | raised),
        "adalomo": {"label": "AdaLomo", "state": "factored", "note": "", "failed": "wants matrices"},
    }
    result = RESULT | {"rows": rows, "verdicts": peer_table.verdicts(rows)}
    page = peer_table.markdown(result)
    assert f"| {PEERS[BASELINE].label} | {BF16_MOMENTS} | 100.0 | 1.000 | 1.000 to 1.000 | 4.0000 | yes |" in page
    assert "| 81.0 | 0.900 | 0.900 to 0.900 | 4.0000 | no (raises ValueError) | yes |" in page
    assert "| AdaLomo [2] | factored | does not run |" in page
    assert "[1] clipping: nothing to clip." in page
    assert "[2] does not run: wants matrices." in page
    assert "python experiments/bench_peers.py" in page
    assert "a processor" in page
    assert "- tutorial is not below our peak: met (80.0 MB; in_backward_all 80.0 MB; sonar 81.0 MB)." in page
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert widths == {len(peer_table.COLUMNS) + 1}
    peer_table.show(result)
    printed = capsys.readouterr().out
    assert "adalomo [2]" in printed
    assert "tutorial is not below our peak: met" in printed


def _spawn(asked, failing=()):
    def spawn(kind, name, settings):
        asked.append((kind, name))
        if kind == "prepare":
            return {"parameters": 1, "start_loss": 5.0, "threads": 1}
        if (kind, name) in failing:
            return {"failed": "it broke"}
        if kind == "checks":
            return {"checks": ROWS[BASELINE]["checks"]}
        return {"heldout_loss": 4.0} if kind == "quality" else {"ms": [2.0, 2.0], "peak_bytes": 10}

    return spawn


def test_a_missing_package_and_a_peer_that_breaks_are_rows_with_their_reason(tmp_path, monkeypatch):
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(bench_peers, "spawn", _spawn(asked, failing={("quality", "tutorial")}))
    monkeypatch.setattr(PEERS["optimi"], "module", "no_such_module", raising=False)
    path, page = tmp_path / "new" / "result.json", tmp_path / "peers.md"
    arguments = ["--rounds", "2", "--peers", "tutorial,optimi,sonar,sonar", "--json", str(path), "--write", str(page)]
    assert bench_peers.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == [BASELINE, "tutorial", "optimi", "sonar"]
    assert rows["optimi"]["failed"] == "torch-optimi is not installed: pip install 'lightning-sonar[bench]'"
    assert rows["tutorial"]["failed"] == "it broke"
    assert rows["sonar"]["ratio"] == 1.0
    assert ("time", "tutorial") not in asked
    assert not any(name == "optimi" for _, name in asked)
    assert [name for kind, name in asked if kind == "time"] == [BASELINE, "sonar", "sonar", BASELINE]
    text = page.read_text()
    assert "pip install 'lightning-sonar[bench]'" in text
    assert "does not run: it broke" in text
    asked.clear()
    page.unlink()
    assert bench_peers.main(["--table", "--json", str(path), "--write", str(page)]) == 0
    assert page.read_text() == text
    assert not asked


@pytest.mark.parametrize("broken_at", range(1, 11))
def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys, broken_at):
    asked: list[tuple[str, str]] = []
    whole, path = _spawn(asked), tmp_path / "result.json"

    def interrupted(kind, name, settings):
        if len(asked) == broken_at - 1:
            raise KeyboardInterrupt
        return whole(kind, name, settings)

    monkeypatch.setattr(bench_peers, "spawn", interrupted)
    arguments = ["--rounds", "2", "--peers", "sonar", "--json", str(path), "--resume"]
    if broken_at <= 9:
        assert bench_peers.main(arguments) == 130
        assert capsys.readouterr().err == "stopped; the same command with --resume goes on\n"
    else:
        assert bench_peers.main(arguments) == 0
    monkeypatch.setattr(bench_peers, "spawn", whole)
    assert bench_peers.main(arguments) == 0
    counts = {question: asked.count(question) for question in asked}
    times = {counts.pop(("time", name)) for name in (BASELINE, "sonar")}
    assert set(counts.values()) == {1}
    assert times == ({2} if broken_at not in (7, 9) else {2, 3}), "a round that was cut through is measured as a whole"
    result = json.loads(path.read_text())
    assert {name: len(rounds) for name, rounds in result["ms"].items()} == {BASELINE: 2, "sonar": 2}
    assert result["rows"]["sonar"]["ratio"] == 1.0


def test_a_comparison_with_other_settings_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "spawn", _spawn([]))
    arguments = ["--rounds", "1", "--peers", "sonar", "--json", str(tmp_path / "result.json"), "--resume"]
    assert bench_peers.main(arguments) == 0
    with pytest.raises(SystemExit, match=r"was measured with \{'steps': 8\}"):
        bench_peers.main([*arguments, "--steps", "3"])


def test_a_comparison_that_goes_on_keeps_the_peers_it_had(tmp_path, monkeypatch):
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(bench_peers, "spawn", _spawn(asked))
    path = tmp_path / "result.json"
    arguments = ["--rounds", "1", "--json", str(path)]
    assert bench_peers.main([*arguments, "--peers", "tutorial"]) == 0
    asked.clear()
    assert bench_peers.main([*arguments, "--peers", "sonar", "--resume"]) == 0
    assert {name for _, name in asked} == {BASELINE, "tutorial", "sonar"}
    assert {name for kind, name in asked if kind != "time"} == {"sonar"}, "but all take their turns in the same rounds"
    assert set(json.loads(path.read_text())["rows"]) == {BASELINE, "tutorial", "sonar"}


@pytest.mark.parametrize("changed", [{"processor": "another"}, {"versions": {"torch": "1.0"}}])
def test_a_comparison_of_another_machine_or_other_versions_is_not_gone_on_with(tmp_path, monkeypatch, changed):
    monkeypatch.setattr(bench_peers, "spawn", _spawn([]))
    path = tmp_path / "result.json"
    arguments = ["--rounds", "1", "--peers", "sonar", "--json", str(path), "--resume"]
    assert bench_peers.main(arguments) == 0
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(SystemExit, match=r"was measured with .*(another|1\.0).*, now it would be"):
        bench_peers.main(arguments)


@pytest.mark.parametrize(("flag", "text"), [("--table", None), *product(("--table", "--resume"), ("{", "[]", "{}"))])
def test_a_file_that_is_no_comparison_is_answered_with_its_name(tmp_path, flag, text):
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=r"--json: .*result\.json (cannot be read|holds no comparison)"):
        bench_peers.main(["--json", str(path), flag])


def test_without_its_baseline_there_is_no_table(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "spawn", _spawn([], failing={("checks", BASELINE)}))
    with pytest.raises(SystemExit, match=f"{BASELINE}, which all are compared with, it broke"):
        bench_peers.main(["--peers", "sonar", "--json", str(tmp_path / "result.json")])


def test_an_unknown_peer_is_answered_with_the_choices(capsys):
    with pytest.raises(SystemExit):
        bench_peers.main(["--peers", "sonnar"])
    assert "--peers takes some of lightning, tutorial, optimi" in capsys.readouterr().err


def test_what_a_peer_says_when_it_cannot_run_is_a_measurement(tmp_path, monkeypatch):
    def refuse(recipe):
        raise CannotRunError("wants matrices")

    monkeypatch.setattr(peer_checks, "check", refuse)
    settings = bench_peers.Settings(str(tmp_path), True, 1, 1, 1, 1e-3)
    assert bench_peers.measure("checks", "adalomo", settings) == {"failed": "wants matrices"}


def test_the_extra_names_every_package_that_a_peer_needs():
    import tomllib

    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["bench"]
    listed = {item.split(">")[0] for item in extra}
    assert listed == {recipe.package for recipe in PEERS.values() if recipe.package}


def test_our_rows_are_the_modes_that_are_meant():
    assert OURS == ("standard", "in_backward_all", "sonar", "sonar_exact_clip", "sonar_bnb8bit", "sonar_ao8bit")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_measures_every_peer_in_processes_of_their_own(tmp_path):
    path, page = tmp_path / "result.json", tmp_path / "peers.md"
    command = [sys.executable, str(ROOT / "experiments" / "bench_peers.py"), "--toy", "--rounds", "1", "--steps", "2"]
    done = subprocess.run(
        [*command, "--json", str(path), "--write", str(page)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert list(result["rows"]) == list(PEERS)
    for name, row in result["rows"].items():
        if PEERS[name].missing():
            assert "is not installed" in row["failed"]
        elif name == "adalomo":
            assert "does not fit expert tensors" in row["failed"]
        else:
            assert row["peak_bytes"] > 0, row
            assert row["heldout_loss"] < result["start_loss"] + 0.1
    assert result["start_loss"] > 0
    assert "Its figures mean nothing" in done.stdout
    assert all(row["label"] in page.read_text() for row in result["rows"].values())
