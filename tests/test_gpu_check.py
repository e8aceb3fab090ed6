"""The GPU check, as it runs where there is no GPU: each part at toy size, and jobs that cost only themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from experiments import gpu_check, gpu_host, gpu_parts, gpu_training
from experiments.measuring import TABLE_MODES, Training, build

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture
def findings() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def check(findings) -> gpu_parts.Check:
    def emit(name: str, line: str, ok: bool | None = None, **figures: Any) -> None:
        findings.append({"name": name, "line": line, "ok": ok, **figures})

    return gpu_parts.Check(CPU, True, emit)


def by_name(findings: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {finding["name"]: finding["ok"] for finding in findings}


# The parts.


def test_layers_compares_by_gradient_and_times_each_backend(check, findings, monkeypatch):
    monkeypatch.setattr(gpu_parts, "LAYER_BACKENDS", ("grouped_mm", "sonicmoe"))
    gpu_parts.layers(check, "olmoe")
    found = by_name(findings)
    assert found["olmoe grouped_mm"] is True
    assert found["sonicmoe: missing"] is None
    assert {"olmoe grouped_mm 8 tokens", "olmoe eager 8 tokens", "olmoe matrix rate"} < set(found)
    errors = next(finding["errors"] for finding in findings if finding["name"] == "olmoe grouped_mm")
    assert set(errors) == {"output", "hidden", "weights", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize(("garbage", "message"), [(7.0, "NOT zeros"), (float("nan"), "NOT zeros")])
def test_garbage_in_the_gradient_of_an_expert_without_tokens_fails(check, findings, monkeypatch, garbage, message):
    plain = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def faulty(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def spoil(grad: torch.Tensor) -> torch.Tensor:
            spoiled = grad.clone()
            spoiled[-1] = garbage
            return spoiled

        self.down_proj.register_hook(spoil)
        return plain(self, hidden, index, weights)

    monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, "faulty", faulty)
    monkeypatch.setattr(gpu_parts, "LAYER_BACKENDS", ("faulty",))
    gpu_parts.layers(check, "olmoe")
    finding = next(finding for finding in findings if finding["name"] == "olmoe faulty")
    assert finding["ok"] is False
    assert message in finding["line"]


def test_a_backend_that_raises_leaves_the_others_their_figures(check, findings, monkeypatch):
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, "broken", broken)
    monkeypatch.setattr(gpu_parts, "LAYER_BACKENDS", ("broken", "grouped_mm"))
    gpu_parts.layers(check, "granite")
    found = by_name(findings)
    assert found["granite broken"] is False
    assert found["granite grouped_mm"] is True
    assert "granite grouped_mm 8 tokens" in found


def test_the_table_has_the_five_modes_with_peaks_and_times(check, findings):
    gpu_training.table(check, "granite", "grouped_mm")
    assert [finding["mode"] for finding in findings] == list(TABLE_MODES)
    assert all(finding["ok"] and finding["peak_gb"] > 0 and finding["median_ms"] > 0 for finding in findings)


def test_out_of_memory_in_one_mode_is_a_finding_and_the_next_mode_runs(check, findings, monkeypatch):
    plain = gpu_training.measure_mode

    def tight(model: Any, mode: str, *rest: Any, **options: Any) -> Any:
        if mode == "standard":
            raise torch.OutOfMemoryError("Tried to allocate 55 GB")
        return plain(model, mode, *rest, **options)

    monkeypatch.setattr(gpu_training, "measure_mode", tight)
    gpu_training.table(check, "olmoe", "eager")
    assert [finding["ok"] for finding in findings] == [False, True, True, True, True]
    assert findings[0]["oom"]


@pytest.mark.usefixtures("deterministic")  # which switches it off again
def test_the_modes_are_equal_to_the_bit_and_a_difference_is_found(check, findings, monkeypatch):
    gpu_training.bitwise(check, "grouped_mm")
    assert [finding["ok"] for finding in findings] == [True, True, True]
    assert all(finding["tensors"] > 40 for finding in findings)

    class Faster(Training):
        def __init__(self, model: Any, mode: str, lr: float) -> None:
            super().__init__(model, mode, lr * (1.5 if mode == "sonar" else 1.0))

    findings.clear()
    monkeypatch.setattr(gpu_training, "Training", Faster)
    gpu_training.bitwise(check, "grouped_mm")
    assert [finding["ok"] for finding in findings] == [True, False, True]


@pytest.mark.filterwarnings("ignore:Gradients are accumulated")
@pytest.mark.usefixtures("deterministic")
def test_host_memory_changes_no_bit_and_a_difference_is_found(check, findings, monkeypatch):
    gpu_host.host(check, "grouped_mm")
    assert [finding["ok"] for finding in findings] == [True, True, None, None, None, None]
    assert findings[3]["peak_gb"] < findings[2]["peak_gb"]
    assert findings[5]["peak_gb"] < findings[4]["peak_gb"]

    class Faster(Training):
        def __init__(self, model: Any, mode: str, lr: float = 1e-5, **options: Any) -> None:
            super().__init__(model, mode, lr * (1.5 if "expert_state_device" in options else 1.0), **options)

    findings.clear()
    monkeypatch.setattr(gpu_host, "Training", Faster)
    gpu_host.host(check, "grouped_mm")
    assert [finding["ok"] for finding in findings[:2]] == [False, True]


def test_the_plan_is_within_five_percent_and_a_wrong_peak_is_found(check, findings):
    wrong = {"model": "olmoe", "backend": "grouped_mm", "mode": "sonar", "peak_gb": 1.0}
    gpu_training.predicted(check, [wrong])
    assert by_name(findings) == {
        "predicted olmoe grouped_mm standard 1 layers": True,
        "predicted olmoe grouped_mm sonar 1 layers": True,
        "predicted olmoe grouped_mm sonar": False,
    }


@pytest.mark.parametrize("name", ["olmoe", "granite"])
def test_full_sizes_are_the_papers(name):
    model = build(name, "eager", torch.device("meta"), toy=False)
    total = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert total == pytest.approx({"olmoe": 6.92, "granite": 3.30}[name], abs=0.005)


# The jobs around them.


def record(**values: Any) -> str:
    made = {"part": 3, "job": "fake", "name": "fake", "ok": True, "line": "a finding", **values}
    return f"print({gpu_check.RECORD + json.dumps(made)!r}, flush=True)"


CODE = {
    "good": record(),
    "aborts": f"{record()}; import os; print('about to abort', flush=True); os.abort()",
    "hangs": f"{record()}; import time; time.sleep(60)",
    "fails": record(ok=False),
    "knows": f"print({gpu_check.RECORD + json.dumps({'machine': {'gpu': 'a card'}})!r}); {record()}",
    "lacks": record(ok=None, backend="sonicmoe", missing="a GPU"),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run made-up jobs; returns the exit code and what was written."""

    def main(*jobs: gpu_check.Job, minutes: float = 1.0) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu_check, "JOBS", jobs)
        monkeypatch.setattr(gpu_check, "command_of", lambda job, *_: [sys.executable, "-c", CODE[job.kind]])
        path = tmp_path / "check.json"
        code = gpu_check.main(["--toy", "--parts", "3", "--minutes", str(minutes), "--json", str(path)])
        return code, json.loads(path.read_text())

    return main


def test_a_job_that_crashes_or_hangs_costs_only_itself(run, capsys):
    code, written = run(
        gpu_check.Job(3, "aborts"), gpu_check.Job(3, "hangs", limit_s=0.5), gpu_check.Job(3, "fails"),
        gpu_check.Job(3, "good"),
    )  # fmt: skip
    outcomes = [entry["outcome"] for entry in written["jobs"]]
    assert outcomes == ["ended with code -6", "stopped at its limit of 1 s", "1 findings failed", "ok"]
    # What was found before the end is kept.
    assert len(written["records"]) == 4
    assert "about to abort" in written["jobs"][0]["detail"]
    assert code == 1
    assert "Not everything passed" in capsys.readouterr().out


def test_a_backend_known_to_be_missing_is_not_tried_again(run, capsys):
    code, written = run(gpu_check.Job(3, "lacks"), gpu_check.Job(3, "aborts", ("olmoe", "sonicmoe")))
    assert [entry["outcome"] for entry in written["jobs"]] == ["not here", "not here"]
    assert written["jobs"][1]["detail"] == "needs a GPU"
    assert code == 0
    assert "part 3, aborts olmoe sonicmoe: not here" in capsys.readouterr().out


def test_what_jobs_say_of_the_gpu_is_written_and_printed_once(run, capsys):
    _, written = run(gpu_check.Job(3, "knows"), gpu_check.Job(3, "knows"))
    assert written["machine"]["gpu"] == "a card"
    assert [entry["outcome"] for entry in written["jobs"]] == ["ok", "ok"]
    assert len(written["records"]) == 2
    assert capsys.readouterr().out.count("gpu a card") == 1


SIGNALLED = """
import sys
from experiments import gpu_check
code = "import os, time; print(os.getpid(), flush=True); print(" + repr(gpu_check.RECORD) + " + '{\\"part\\": 3, "
code += "\\"ok\\": true, \\"line\\": \\"' + str(os.getpid()) + '\\"}', flush=True); time.sleep(60)"
gpu_check.JOBS = (gpu_check.Job(3, "hangs"),)
gpu_check.command_of = lambda *_: [sys.executable, "-c", code]
gpu_check.main(["--toy", "--parts", "3", "--json", sys.argv[1]])
"""


def test_sigterm_ends_the_running_job_too(tmp_path):
    path = tmp_path / "check.json"
    command = [sys.executable, "-c", SIGNALLED, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        job = next(int(line.split()[1]) for line in process.stdout if line.startswith("  ok   "))
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(job, 0)
    finally:
        process.kill()
        process.communicate()
    assert json.loads(path.read_text())["toy"] is True  # whole, whatever the signal broke off


def test_without_time_jobs_are_skipped_and_said_to_be(run):
    code, written = run(gpu_check.Job(3, "good"), minutes=0.0)
    assert [entry["outcome"] for entry in written["jobs"]] == ["skipped: no time left"]
    assert code == 1


def test_the_jobs_come_in_the_order_of_what_matters():
    parts = [job.part for job in gpu_check.JOBS if "granite" not in job.arguments]
    assert parts == sorted(parts)
    assert set(parts) == {1, 2, 3, 4, 5, 6}
    last = [job for job in gpu_check.JOBS if "granite" in job.arguments]
    assert list(gpu_check.JOBS[-len(last) :]) == last


def test_an_unknown_part_is_answered_with_the_choices():
    with pytest.raises(SystemExit, match=r"--parts 1,9: expected some of 1,2,3,4,5,6, or one of: adamw, layers olmoe"):
        gpu_check.select("1,9")


WITHOUT = """
import importlib, importlib.metadata as metadata, sys

HIDDEN = {"hydra": "hydra-core", "omegaconf": "omegaconf", "datasets": "datasets"}


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def from_name(cls, name, plain=metadata.Distribution.from_name.__func__):
    if name.lower() in HIDDEN.values():
        raise metadata.PackageNotFoundError(name)
    return plain(cls, name)


sys.meta_path.insert(0, Hide())
metadata.Distribution.from_name = classmethod(from_name)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_nothing_it_imports_needs_hydra_omegaconf_or_datasets():
    modules = ["gpu_check", "gpu_host", "gpu_parts", "gpu_training", "measuring", "bench"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *(f"experiments.{name}" for name in modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_script_runs_at_toy_size_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "gpu_check.py"), "--toy", "--minutes", "25", "--json", str(path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = json.loads(path.read_text())
    assert [entry["job"] for entry in written["jobs"]] == [job.name for job in gpu_check.JOBS]
    outcomes = {entry["job"]: entry["outcome"] for entry in written["jobs"]}
    assert {name for name, outcome in outcomes.items() if outcome != "ok"} == {
        "table olmoe sonicmoe",
        "table granite sonicmoe",
    }
    assert "Its figures say nothing about a GPU" in done.stdout
    assert {"adamw bfloat16", "olmoe scattermoe", "bitwise scattermoe sonar"} < {r["name"] for r in written["records"]}
