from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from report_runs import result, write_run

from experiments import sweep
from experiments.launch import RunFolder, SweepFolder, launch
from experiments.status import read_status, why, write_status
from experiments.sweep import run_in_sweep, settings_sha256
from lightning_sonar import MODES
from lightning_sonar.config_dir import config_dir

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["trainer.max_steps=3", "trainer.limit_val_batches=1", "model.num_layers=1", "model.size=tiny"]
SMALL += ["callbacks.memory_profiler.warmup=1", "callbacks.memory_profiler.steps=1", "data.seq_len=128"]


def composed(*overrides: str):
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def settings(folder: Path, **changed):
    return OmegaConf.create({"objective": "heldout_loss", "ckpt_path": None, "out": str(folder / "x"), **changed})


@pytest.fixture
def spawned(monkeypatch):
    """Jobs that were started; each ends with the code that ``codes`` has for its folder's name."""
    started: list[str] = []
    codes: dict[str, int] = {}

    def spawn(script: Path, arguments: list[str], folder: Path) -> int:
        started.append(folder.name)
        if not (code := codes.get(folder.name, 0)):
            sha256 = settings_sha256(settings(folder), folder)
            (folder / "result.json").write_text(json.dumps(result("sonar", settings_sha256=sha256)))
        return code

    monkeypatch.setattr(sweep, "_spawn", spawn)
    return started, codes


def run(folder: Path, **changed) -> float:
    folder.mkdir(exist_ok=True)
    return run_in_sweep(settings(folder, **changed), Path("run.py"), [], folder)


def test_a_finished_job_is_skipped_and_a_failed_one_is_run_again(tmp_path, spawned, capsys):
    started, codes = spawned
    codes["1"] = 3
    assert [run(tmp_path / name) for name in ("0", "1")] == [6.5, math.inf]
    assert read_status(tmp_path / "1")["exit_code"] == 3
    codes.clear()
    assert [run(tmp_path / name) for name in ("0", "1")] == [6.5, 6.5]
    assert started == ["0", "1", "1"]
    assert "skipped, its result.json is complete" in capsys.readouterr().out
    assert read_status(tmp_path / "1")["exit_code"] == 0


def test_a_broken_result_is_no_result(tmp_path, spawned):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "result.json").write_text('{"heldout_loss":')
    assert run(tmp_path / "0") == 6.5
    assert spawned[0] == ["0"]


def test_a_result_of_other_settings_is_neither_taken_nor_lost(tmp_path, spawned, capsys):
    run(tmp_path / "0")
    kept = (tmp_path / "0" / "result.json").read_text()
    assert run(tmp_path / "0", seed=7) == math.inf
    assert (tmp_path / "0" / "result.json").read_text() == kept
    assert spawned[0] == ["0"]
    assert read_status(tmp_path / "0")["exit_code"] == 2
    assert "Start this sweep in another folder (hydra.sweep.dir=...)" in capsys.readouterr().err


def test_an_old_error_does_not_outlive_a_new_attempt(tmp_path, spawned):
    write_run(tmp_path / "0", error="long ago", status={"exit_code": 2})
    run(tmp_path / "0")
    assert not (tmp_path / "0" / "error.txt").exists()


def test_a_sweeper_gets_the_figure_that_it_asks_for(tmp_path, spawned, capsys):
    run(tmp_path / "0")
    for objective, value in (("step_time_ms.median", 250.0), ("peak_memory_bytes", 520_044_108.0)):
        assert sweep._objective(settings(tmp_path / "0", objective=objective), tmp_path / "0") == value
    assert sweep._objective(settings(tmp_path / "0", objective="mode"), tmp_path / "0") == math.inf
    assert "objective=mode" in capsys.readouterr().err


def test_the_hash_follows_settings_and_not_places(tmp_path):
    here, there = tmp_path / "a folder", tmp_path / 'b"'
    first = settings_sha256(settings(here), here)
    assert settings_sha256(settings(there), there) == first
    assert settings_sha256(settings(here, ckpt_path="last"), here) == first
    assert settings_sha256(settings(here, seed=1), here) != first


def test_the_reason_is_one_line(tmp_path):
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: first\n\nDuring handling\n\n'
    trace += "Traceback (most recent call last):\ntorch.OutOfMemoryError: no room\nOut of memory in backward: a note\n"
    (tmp_path / "error.txt").write_text(trace)
    assert why(tmp_path, 3) == "torch.OutOfMemoryError: no room"
    (tmp_path / "error.txt").write_text("data.path: no such file\nsecond line\n")
    write_status(tmp_path, 2, 1.25)
    assert read_status(tmp_path) == {"exit_code": 2, "seconds": 1.2, "error": "data.path: no such file"}
    (tmp_path / "error.txt").unlink()
    assert why(tmp_path, -9) == "ended by SIGKILL (the system does that when memory runs out)"
    assert why(tmp_path, 1).startswith("it ended before training began")
    assert why(tmp_path, None) == "interrupted, or still running"


def test_the_callback_remembers_the_sweeps_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SweepFolder, "path", None)
    SweepFolder().on_multirun_start(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert SweepFolder.path == tmp_path
    assert f"it goes on with hydra.sweep.dir={tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["olmoe", "granite"])
@pytest.mark.parametrize("backend", ["sonicmoe", "scattermoe"])
def test_the_papers_pairs_are_as_in_the_paper(model, backend):
    cfg = composed(f"experiment=paper_{model}_{backend}")
    assert (cfg.model.name, cfg.model.size, cfg.backend.name, cfg.data.source) == (model, "full", backend, "alpaca")
    assert (cfg.trainer.max_steps, cfg.data.batch_size, cfg.data.seq_len) == (2000, 2, 256)
    assert cfg.trainer.precision == "bf16-true"
    params = cfg.hydra.sweeper.params
    assert (params.model, params.backend, params.mode.split(",")) == (model, backend, list(MODES))


def test_the_paper_as_a_whole_sweeps_over_its_four_pairs():
    params = composed("experiment=paper").hydra.sweeper.params
    assert (params.model, params.backend) == ("olmoe,granite", "sonicmoe,scattermoe")
    assert params.mode.split(",") == list(MODES)


def test_the_small_paper_fits_two_cores_and_needs_no_network():
    cfg = composed("experiment=paper_small")
    assert (cfg.model.size, cfg.data.source) == ("tiny", "builtin")
    assert cfg.hydra.sweeper.params == {"model": "olmoe,granite", "backend": "grouped_mm", "mode": ",".join(MODES)}
    longer = composed("experiment=paper_small_seeds").hydra.sweeper.params
    assert longer == {**cfg.hydra.sweeper.params, "backend": "grouped_mm,eager", "seed": "0,1,2"}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    # joblib's workers share out the threads, and sums over another number of them differ in their last bits.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, str(ROOT / "experiments/run.py"), "-m", *arguments]
    return subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_survives_a_failing_job_and_goes_on_where_it_stopped(tmp_path):
    late = tmp_path / "late.jsonl"
    good = tmp_path / "good.jsonl"
    good.write_text("\n".join(json.dumps({"instruction": f"Say {i}", "output": f"It is {i}."}) for i in range(60)))
    call = ["data=json", f"data.path={late},{good}", "mode=standard,sonar", *SMALL, f"hydra.sweep.dir='{tmp_path}/s'"]
    first = command(*call)
    assert first.returncode == 2, first.stderr
    folder = tmp_path / "s"
    assert {path.parent.name for path in folder.glob("*/result.json")} == {"2", "3"}
    text = (folder / "report.md").read_text()
    assert "2 runs, 2 without a result" in text
    assert "late.jsonl" in text[text.index("Runs without a result") :]
    assert (folder / "figures" / "memory.png").exists()
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}

    late.write_text(good.read_text())
    second = command(*call)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("skipped, its result.json is complete") == 2
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert "4 runs\n" in (folder / "report.md").read_text()
    losses = {path.parent.name: json.loads(path.read_text())["heldout_loss"] for path in folder.glob("*/result.json")}
    assert losses["0"] == losses["2"]

    third = command(*call, "seed=5")
    assert third.returncode == 2
    assert "holds the result of a run with other settings" in third.stderr
    assert "4 runs, 4 without" in (folder / "report.md").read_text()


def installed(plugin: str) -> None:
    pytest.importorskip(f"hydra_plugins.{plugin}", reason='pip install "lightning-sonar[sweep]"')


LAUNCHERS = {
    "hydra_joblib_launcher": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "hydra_submitit_launcher": ["hydra/launcher=submitit_local"],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plugin", LAUNCHERS)
def test_another_launcher_leaves_the_same_sweep(tmp_path, plugin):
    installed(plugin)
    call = [*SMALL, "mode=sonar", "backend=grouped_mm,sonicmoe"]
    runs = {}
    for name, launcher in (("here", []), ("there", LAUNCHERS[plugin])):
        folder = tmp_path / name
        done = command(*call, *launcher, f"hydra.sweep.dir='{folder}'")
        assert done.returncode == 2, done.stderr
        text = (folder / "report.md").read_text()
        assert "1 run, 1 without a result" in text
        assert "backend='sonicmoe' cannot run on cpu" in text
        runs[name] = json.loads((folder / "0/result.json").read_text())
    assert runs["here"]["heldout_loss"] == runs["there"]["heldout_loss"]
    assert runs["here"]["settings_sha256"] == runs["there"]["settings_sha256"]
    stamp = (tmp_path / "there/0/result.json").stat().st_mtime_ns
    again = command(*call, *LAUNCHERS[plugin], f"hydra.sweep.dir='{tmp_path / 'there'}'")
    assert again.returncode == 2, again.stderr
    assert (tmp_path / "there/0/result.json").stat().st_mtime_ns == stamp


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_optunas_sweeper_finds_the_best_job_and_goes_on_in_its_folder(tmp_path):
    installed("hydra_optuna_sweeper")
    folder = tmp_path / "s"
    call = [*SMALL, "mode=sonar", "optimizer.lr=interval(0.00001,0.001)", "backend=choice(grouped_mm,sonicmoe)"]
    call += ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1"]
    first = command(*call, f"hydra.sweep.dir='{folder}'")
    assert first.returncode == 2, first.stderr
    losses = {path.parent.name: json.loads(path.read_text())["heldout_loss"] for path in folder.glob("*/result.json")}
    assert 2 <= len(losses) < 4, "with this seed some trials cannot run, which is no reason to stop"
    best = OmegaConf.load(folder / "optimization_results.yaml")
    assert best.best_value == min(losses.values())
    assert best.best_params.backend == "grouped_mm"
    second = command(*call, f"hydra.sweep.dir='{folder}'")
    assert second.stdout.count("skipped, its result.json is complete") == len(losses)
    assert OmegaConf.load(folder / "optimization_results.yaml") == best


def faked(monkeypatch, *arguments: str, seen: list[list[str]] | None = None) -> int:
    """The command with jobs that only leave their arguments in ``seen``."""

    def run_in_sweep(cfg, script, arguments, folder):
        if seen is not None:
            seen.append(sorted(arguments))
        return 0.0

    monkeypatch.setattr("experiments.sweep.run_in_sweep", run_in_sweep)
    monkeypatch.setattr("experiments.launch._report", lambda folder: 0)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return launch(ROOT / "experiments/run.py", list(arguments))


@pytest.mark.parametrize(
    ("given", "jobs"),
    [
        ([], 12),
        (["mode=sonar"], 2),
        (["mode=standard,sonar", "model=granite"], 2),
        (["seed=0,1"], 24),
        (["backend=eager,grouped_mm", "model=olmoe", "mode=sonar"], 2),
    ],
)
def test_the_command_line_takes_the_place_of_what_an_experiment_sweeps_over(tmp_path, monkeypatch, given, jobs):
    seen: list[list[str]] = []
    assert faked(monkeypatch, "-m", "experiment=paper_small", *given, f"hydra.sweep.dir='{tmp_path}'", seen=seen) == 0
    assert len(seen) == jobs
    assert len({tuple(job) for job in seen}) == jobs, "no job twice"
    for job in seen:
        assert len({override.split("=")[0] for override in job}) == len(job), "no key twice"


@pytest.mark.parametrize(("overrides", "says"), [(["experiment=paper_small"], True), ([], False)])
def test_an_experiment_that_is_a_sweep_says_so_where_one_run_is_made_of_it(tmp_path, capsys, overrides, says):
    cfg = composed(*overrides, f"hydra.run.dir='{tmp_path}/a'")
    RunFolder().on_run_start(cfg)
    assert ("a sweep over model, backend, mode, of which this is one run; -m" in capsys.readouterr().out) is says
    cfg = composed(*overrides, f"hydra.run.dir='{tmp_path}/b'", "hydra.mode=RUN")
    RunFolder().on_run_start(cfg)
    assert not capsys.readouterr().out, "a job of a sweep need not be told"


def test_an_experiment_that_is_swept_over_says_what_it_does_not_run(tmp_path, monkeypatch, capsys):
    folder = f"hydra.sweep.dir='{tmp_path}'"
    assert faked(monkeypatch, "-m", "experiment=smoke,paper_small", "mode=sonar", folder) == 0
    said = capsys.readouterr().out
    assert said.count("this job's experiment is a sweep over") == 1
    assert "a sweep over backend, model, which it runs if given alone" in said
    assert faked(monkeypatch, "-m", "experiment=paper_small", "mode=sonar", folder) == 0
    assert "is a sweep over" not in capsys.readouterr().out


@pytest.mark.parametrize("shows", [["--cfg", "job"], ["--info", "defaults"], ["-c", "hydra"]])
def test_the_configuration_of_a_whole_sweep_is_refused_in_one_line(tmp_path, monkeypatch, capsys, shows):
    assert faked(monkeypatch, "-m", "mode=sonar", *shows) == 2
    assert capsys.readouterr().err == f"run.py: {shows[0]} shows the configuration of one run: leave out -m.\n"


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_a_range_without_a_sweeper_that_searches_is_answered_with_one(monkeypatch, capsys, flags):
    assert faked(monkeypatch, *flags, "optimizer.lr=interval(1e-5,1e-3)") == 2
    said = capsys.readouterr().err
    assert said.startswith("run.py: optimizer.lr=interval(1e-5,1e-3): a range needs a sweeper that searches")
    assert "-m hydra/sweeper=optuna (pip install 'lightning-sonar[sweep]')" in said
