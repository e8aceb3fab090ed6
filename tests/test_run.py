"""Whole runs of the command line, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from helpers import small_model

from experiments.result import write_json
from lightning_sonar import MODES

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["trainer.max_steps=4", "trainer.limit_val_batches=1", "model.num_layers=1", "data.max_records=200"]
SMALL += ["data.seq_len=128", "callbacks.memory_profiler.warmup=1", "callbacks.memory_profiler.steps=1"]
KEYS = {
    *("model", "size", "params_total", "params_expert", "mode", "backend", "optimizer", "data", "device", "dtype"),
    *("seed", "steps", "batch_size", "seq_len", "peak_memory_bytes", "peak_phase", "peak_expert_grad_bytes"),
    *("hooks_per_step", "step_time_ms", "tokens_per_second", "train_loss", "heldout_loss", "heldout_perplexity"),
    *("grad_norm", "clip_norm", "versions"),
}


def command(*arguments, folder=None, cwd=ROOT, python=sys.executable):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    where = [f"hydra.run.dir='{folder}'"] if folder else []
    return subprocess.run(
        [python, str(ROOT / "experiments/run.py"), *arguments, *where],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=500,
        check=False,
    )


def test_the_literal_command_leaves_all_figures(tmp_path):
    done = command("model=olmoe", "mode=sonar", *SMALL, "trainer.log_every_n_steps=1", folder=tmp_path / "a run, 1=2")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "a run, 1=2"
    result = json.loads((folder / "result.json").read_text())
    assert set(result) >= KEYS
    assert all(result[key] is not None for key in KEYS)
    assert result["hooks_per_step"] == 2
    assert result["steps"] == 4
    assert result["peak_expert_grad_bytes"] == 64 * 512 * 256 * 2
    assert result["peak_memory_bytes"] > 3 * 2 * result["params_total"]
    assert set(result["step_time_ms"]) == {"median", "p10", "p90"}
    for name in ("config.yaml", "metrics.csv", "memory.json", "memory.png"):
        assert (folder / name).stat().st_size > 100
    assert "chose TINY, because there is no GPU" in done.stdout
    assert done.stdout.endswith(f"  figures in     {folder}\n")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.num_layer=2"], "Did you mean model.num_layers?"),
        (["mode=sonnar"], "there is no mode of that name. Choose one of in_backward_all, sonar"),
        (["data.path=file.jsonl"], "path='file.jsonl'"),
        (["model.size=huge"], "model.size=huge: expected one of auto, tiny, full"),
        (["data=json", "data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["mode=in_backward_all", "trainer.gradient_clip_val=1.0"], "trainer.gradient_clip_val=null"),
        (
            ["model.size=full"],
            "allenai/OLMoE-1B-7B-0924 in mode sonar needs 43.9 GB by the plan",
        ),
    ],
)
def test_a_users_mistake_ends_in_one_message_and_a_code_that_is_not_zero(tmp_path, arguments, message):
    done = command(*arguments, folder=tmp_path / "run")
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_every_mode_with_every_backend_trains_and_a_failing_job_stops_nothing(tmp_path):
    modes = ",".join(MODES)
    done = command(
        "-m", f"mode={modes}", "backend=eager,grouped_mm,batched_mm", *SMALL, f"hydra.sweep.dir='{tmp_path}'"
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    assert {(r["mode"], r["backend"]) for r in results} == {
        (mode, backend) for mode in MODES for backend in ("eager", "grouped_mm", "batched_mm")
    }
    loss = {r["mode"]: r["heldout_loss"] for r in results if r["backend"] == "grouped_mm"}
    assert loss["sonar"] == loss["standard_no_expert_clip"] == loss["sonar_per_expert"]
    hooks = {r["mode"]: r["hooks_per_step"] for r in results if r["backend"] == "grouped_mm"}
    assert hooks["standard"] == 0
    assert hooks["sonar"] == 2
    assert hooks["sonar_per_expert"] == 2 * 64
    text = (tmp_path / "report.md").read_text()
    assert text.count("## olmoe (tiny), ") == 3
    assert all(text.count(f"| {mode} |") == 3 for mode in MODES)
    assert "gives up" in text


@pytest.mark.slow
def test_a_sweep_with_a_failing_job_finishes_the_others_and_fails(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    good = tmp_path / "good.jsonl"
    good.write_text("\n".join(json.dumps({"instruction": f"Say {i}", "output": f"It is {i}."}) for i in range(60)))
    done = command(
        "-m", "data=json", f"data.path={tmp_path}/empty.jsonl,{good}", *SMALL, f"hydra.sweep.dir='{tmp_path}/sweep'"
    )
    assert done.returncode != 0
    assert (tmp_path / "sweep/1/result.json").exists()
    assert not (tmp_path / "sweep/0/result.json").exists()
    assert "| 2 | " in (tmp_path / "sweep/report.md").read_text()
    assert "empty" in (tmp_path / "sweep/0/error.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["model=granite"],
        ["optimizer=torch_adamw", "scheduler=onecycle"],
        ["trainer.precision=bf16-mixed", "model.checkpointing=true", "model.router_aux_loss=0.01"],
        ["trainer.precision=32", "trainer.accumulate_grad_batches=2", "model.attn_implementation=eager"],
        ["callbacks=none", "logger=none"],
        ["callbacks=checkpoint"],
        ["experiment=smoke"],
        ["+model.overrides.rope_parameters={rope_type:default,rope_theta:5000.0}", "export=hf"],
    ],
    ids=" ".join,
)
def test_other_settings_train(tmp_path, arguments):
    small = [a for a in SMALL if "callbacks=none" not in arguments or not a.startswith("callbacks")]
    done = command(*small, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["heldout_loss"] > 0
    checkpoints = list(tmp_path.rglob("*.ckpt"))
    assert bool(checkpoints) == (arguments == ["callbacks=checkpoint"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["olmoe", "granite"])
def test_sonar_peaks_at_least_15_percent_lower_at_the_tiny_sizes_defaults(tmp_path, model):
    peaks = {}
    for mode in ("standard_no_expert_clip", "sonar"):
        folder = tmp_path / mode
        done = command(
            f"model={model}", f"mode={mode}", "trainer.max_steps=6", "trainer.limit_val_batches=1", folder=folder
        )
        assert done.returncode == 0, done.stderr
        result = json.loads((folder / "result.json").read_text())
        peaks[mode] = result["peak_memory_bytes"]
    assert peaks["sonar"] <= 0.85 * peaks["standard_no_expert_clip"]
    memory = json.loads((tmp_path / "sonar/memory.json").read_text())
    assert memory["peak_expert_gradients"] == 1


@pytest.mark.slow
def test_a_local_hugging_face_folder_trains(tmp_path):
    import lightning_sonar.models as ours
    from lightning_sonar.data import train_tokenizer

    folder = tmp_path / "checkpoint"
    ours.build("granite", num_layers=1).save_pretrained(folder)
    train_tokenizer(["def f(x): return the sum of x"] * 9, vocab_size=300).save_pretrained(folder)
    small = [argument for argument in SMALL if "num_layers" not in argument]
    done = command("model=hf", f"model.id='{folder}'", *small, folder=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["model"] == "hf"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_and_an_editable_install_find_their_configs(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path), str(ROOT)], check=True
    )
    wheel = next(tmp_path.glob("*.whl"))
    site = next(path for path in sys.path if path.endswith("site-packages"))
    code = (
        "from lightning_sonar.config_dir import config_dir as c; assert (c() / 'mode/sonar.yaml').is_file(); print(c())"
    )
    for name, what in (("wheel", [str(wheel)]), ("editable", ["-e", str(ROOT), "--no-build-isolation"])):
        venv.create(tmp_path / name, with_pip=True)
        python = tmp_path / name / "bin/python"
        # The dependencies come from the environment of the tests, behind the package that is installed here.
        packages = next((tmp_path / name / "lib").glob("python*/site-packages"))
        (packages / "zz_dependencies.pth").write_text(site)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *what], check=True)
        found = subprocess.run([python, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
        assert found.stdout.startswith(str(packages if name == "wheel" else ROOT))


def test_a_run_that_will_write_checkpoints_looks_at_the_disk_first(tmp_path, monkeypatch):
    from experiments.job import _check_disk
    from experiments.settings import SettingsError

    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(SettingsError, match=r"needs about 0\.0 GB, but .* has 0\.0 GB free. Free some disk"):
        _check_disk(small_model(), tmp_path)


def test_a_figure_that_is_no_number_is_written_as_null(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": float("nan"), "b": [float("inf"), -float("inf"), 1.5], "c": {"d": (1, None)}})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, None, 1.5], "c": {"d": [1, None]}}


def test_what_was_not_measured_is_not_shown_as_none(monkeypatch, capsys):
    from report_runs import result
    from rich.console import Console

    from experiments import job

    monkeypatch.setattr(job, "console", Console(width=160))
    more = {"accumulation": "exact", "expert_state_device": None, "train_loss_first": 8.3}
    job._show(result("sonar", **more), {})
    assert "GB (phase: backward; predicted: " in capsys.readouterr().out
    more |= {"peak_memory_bytes": None, "predicted_peak_bytes": None, "peak_phase": None}
    more |= {"step_time_ms": {"median": None, "p10": None, "p90": None}}
    job._show(result("sonar", **more), {})
    said = capsys.readouterr().out
    assert "peak memory    not measured\n" in said
    assert "None" not in said
