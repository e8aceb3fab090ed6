"""Fits that run out of memory: by a module that refuses, and for real under a limit of the address space."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_out_of_memory import ON_CPU, ON_CUDA, cuda_figures
from test_profiler import Automatic, fit, loader, nbytes, trainer_for

from experiments import job
from lightning_sonar.memory import MemoryProfiler, diagnosis, explain
from lightning_sonar.strategies import SonarMoEStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Refused(Automatic):
    """Asks for more than there is, in forward or in backward."""

    where, kind, text = "forward", torch.OutOfMemoryError, ON_CUDA

    def loss(self, ids):
        loss = super().loss(ids)
        if self.global_step == 4 and self.where == "forward":
            self.refuse()
        if self.global_step == 4 and loss.requires_grad:
            loss.register_hook(self.refuse)
        return loss

    def refuse(self, grad=None):
        raise self.kind(self.text)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["sonar", "auto"])
def test_the_exception_keeps_its_type_and_gets_a_note(tmp_path, caplog, where, strategy):
    module, callback = Refused(), MemoryProfiler(warmup=6, steps=1, dirpath=tmp_path)
    module.where = where
    kind = SonarMoEStrategy(mode="standard") if strategy == "sonar" else "auto"
    with (
        caplog.at_level(logging.ERROR, logger="lightning_sonar"),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught,
    ):
        trainer_for(callback, strategy=kind).fit(module, loader())
    told = callback.out_of_memory
    assert told is not None
    assert caught.value.__notes__ == [told.message]
    assert [record.getMessage() for record in caplog.records] == [told.message]
    assert (told.phase, told.step, told.asked_bytes) == (where, 4, 2.5 * 2**30)
    assert told.mode == ("standard" if strategy == "sonar" else None)
    assert json.loads((tmp_path / "out_of_memory.json").read_text()) == json.loads(json.dumps(told.to_dict()))
    assert callback.report is None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_watched_step_gives_the_rest_from_the_tracker(where):
    module, callback = Refused(), MemoryProfiler(warmup=4, steps=1)
    module.where, module.kind, module.text = where, RuntimeError, ON_CPU
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trainer_for(callback, strategy=SonarMoEStrategy(mode="standard")).fit(module, loader())
    told = callback.out_of_memory
    assert told.alive.rest_source == diagnosis.FROM_TRACKER
    assert told.alive.parameters == nbytes(module.parameters())
    # Activations of this model take some tens of kilobytes, the process some hundreds of megabytes.
    assert 1e3 < told.alive.rest < 1e6


def test_on_cuda_a_snapshot_is_written_beside_the_figures(tmp_path, monkeypatch):
    # The module is on the CPU; only what asks the device is told that it is CUDA's.
    cuda_figures(monkeypatch, in_use=10**9, reserved=2 * 10**9, free=10**8, total=4 * 10**9)
    real = explain.diagnose
    monkeypatch.setattr(diagnosis, "_is_on", lambda tensor, device: True)
    monkeypatch.setattr(explain, "diagnose", lambda *a, **k: real(*a, **{**k, "device": torch.device("cuda:0")}))
    monkeypatch.setattr(explain, "possible", lambda device: True)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"snapshot"))
    callback = MemoryProfiler(dirpath=tmp_path, warmup=6)
    with pytest.raises(torch.OutOfMemoryError):
        trainer_for(callback, strategy=SonarMoEStrategy()).fit(Refused(), loader())
    names = ["out_of_memory.json", "out_of_memory_snapshot.pickle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert callback.out_of_memory.capacity_bytes == 2_100_000_000
    assert "on cuda:0 in phase 'forward'" in callback.out_of_memory.message


def test_a_planners_answer_stands_before_the_arithmetic():
    seen = []

    def advise(told):
        seen.append(told)
        return ["mode='sonar' peaks at 1.00 GB"]

    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer_for(MemoryProfiler(advise=advise)).fit(Refused(), loader())
    (note,) = caught.value.__notes__
    assert note.index("mode='sonar' peaks at 1.00 GB") < note.index("by arithmetic")
    assert seen[0].phase == "forward"


@pytest.mark.parametrize("broken", ["advise", "diagnose"])
def test_a_fault_in_the_explanation_never_hides_the_failure(monkeypatch, broken):
    def breaks(*args, **kwargs):
        raise KeyError("broken on purpose")

    callback = MemoryProfiler(advise=breaks)
    if broken == "diagnose":
        monkeypatch.setattr(explain, "diagnose", breaks)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer_for(callback).fit(Refused(), loader())
    (note,) = caught.value.__notes__
    assert "KeyError: 'broken on purpose'" in note
    assert ("by arithmetic" in note) is (broken == "advise")


def test_a_later_fit_forgets_the_failure():
    callback = MemoryProfiler()
    with pytest.raises(torch.OutOfMemoryError):
        trainer_for(callback).fit(Refused(), loader())
    assert callback.out_of_memory is not None
    assert fit(Automatic(), callback) is not None
    assert callback.out_of_memory is None


@pytest.mark.parametrize(
    ("note", "printed"),
    [("What happened.\nAnd what helps.", "error: What happened.\n"), (None, "error: Out of memory.")],
)
def test_a_job_that_runs_out_of_memory_ends_in_one_message(tmp_path, monkeypatch, capsys, note, printed):
    def train(cfg, folder):
        error = torch.OutOfMemoryError(ON_CUDA)
        if note:
            error.add_note(note)
        raise error

    monkeypatch.setattr(job, "train", train)
    assert job.run_job(None, tmp_path) == job.OUT_OF_MEMORY == 3
    said = capsys.readouterr().err
    assert said.startswith(printed)
    assert "Traceback" not in said
    assert "Traceback" in (tmp_path / "error.txt").read_text()


LIMITED = """
import gc, json, resource, sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, psutil, torch
import test_profiler as t
from lightning_sonar import MemoryProfiler, SonarMoEStrategy

torch.set_num_threads(1)
t.EXPERTS, t.HIDDEN, t.INNER, t.LAYERS = 8, 128, 256, 8
UNLIMITED = resource.RLIM_INFINITY

class Limit(pl.Callback):
    # Room for half of the gradients, once all states are there.
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2:
            gc.collect()  # or what the run before left behind is freed under the limit, and makes room
            room = t.nbytes(module.parameters()) // 2
            resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, UNLIMITED))

def run(mode, warmup, folder=None):
    module, callback = t.Automatic(), MemoryProfiler(warmup, 1, folder, figure=False)
    trainer = t.trainer_for(callback, callbacks=[Limit(), callback], strategy=SonarMoEStrategy(mode=mode), max_steps=4)
    try:
        trainer.fit(module, t.loader())
    except RuntimeError as error:
        resource.setrlimit(resource.RLIMIT_AS, (UNLIMITED, UNLIMITED))
        return {"notes": error.__notes__, "error": str(error), **callback.out_of_memory.to_dict()}
    resource.setrlimit(resource.RLIMIT_AS, (UNLIMITED, UNLIMITED))
    return {"steps": trainer.global_step}

runs = {"unwatched": run("standard", 3, sys.argv[1]), "watched": run("standard", 2), "sonar": run("sonar", 3)}
print("RUNS" + json.dumps(runs))
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A fit in three ways under one limit of the address space."""
    folder = tmp_path_factory.mktemp("limited")
    root = Path(__file__).resolve().parent
    # glibc would keep freed tensors for itself otherwise, and the limit would bind later.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root.parent)])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout.rsplit("RUNS", 1)[1])
    return runs, folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits")
@pytest.mark.parametrize("run", ["unwatched", "watched"])
def test_a_real_failure_names_phase_content_and_a_mode_that_would_have_fitted(limited, run):
    told = limited[0][run]
    assert "DefaultCPUAllocator" in told["error"]
    (message,) = told["notes"]
    assert message == told["message"]
    assert "in phase 'backward' of optimizer step 2 (mode 'standard')" in message
    expert, parameters = 8 * 128 * 2 * 256 * 4, 8 * (8 * 128 * 3 * 256 * 4)  # bytes: a gate_up_proj, all experts
    assert told["asked_bytes"] in (expert, expert // 2)
    assert told["asked_gradient"]
    alive = told["alive"]
    assert alive["parameters"] == pytest.approx(parameters, rel=0.01)
    assert alive["optimizer_state"] == pytest.approx(2 * parameters, rel=0.01)
    assert expert <= alive["expert_gradients"] < parameters
    assert "parameters 25.2 MB, optimizer state 50.5 MB, expert gradients" in message
    best = told["options"][0]
    assert (best["change"], best["fits"]) == ("mode='sonar'", True)
    assert best["needed_bytes"] <= told["capacity_bytes"] < told["needed_bytes"]
    assert told["needed_by_mode"]["standard"] - best["needed_bytes"] == parameters - expert


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits")
def test_the_mode_that_is_said_to_fit_does_fit(limited):
    assert limited[0]["sonar"] == {"steps": 4}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits")
def test_a_real_failure_leaves_its_figures_in_a_file(limited):
    runs, folder = limited
    assert [path.name for path in folder.iterdir()] == ["out_of_memory.json"]
    assert json.loads((folder / "out_of_memory.json").read_text())["message"] == runs["unwatched"]["message"]
