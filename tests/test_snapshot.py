"""The CUDA allocator's history, with stand-ins for the functions that only a CUDA build has."""

import pickle

import pytest
import torch
from test_profiler import Automatic, fit, loader, trainer_for

from lightning_sonar.memory import MemoryProfiler, explain, profiler
from lightning_sonar.memory.snapshot import MAX_ENTRIES, AllocatorHistory

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture
def recorder(monkeypatch):
    """What was asked of the recorder, in order; the CPU counts as a device that has one."""
    calls = []

    def record(enabled="all", **kwargs):
        calls.append(("on", kwargs["max_entries"]) if enabled else ("off",))

    def dump(filename):
        calls.append(("dump",))
        with open(filename, "wb") as file:
            pickle.dump({"segments": [], "device_traces": []}, file)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    for module in (profiler, explain):
        monkeypatch.setattr(module, "possible", lambda device: True)
    return calls


class Noted(Automatic):
    """Writes down in which steps the recorder is on."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.recorded = calls, []

    def training_step(self, batch, batch_idx):
        if self.calls and self.calls[-1][0] == "on":
            self.recorded.append(self.global_step)
        return super().training_step(batch, batch_idx)


def test_history_is_recorded_over_the_watched_steps_only(recorder, tmp_path):
    module = Noted(recorder)
    report = fit(module, MemoryProfiler(snapshot=True, dirpath=tmp_path, figure=False))
    assert recorder == [("on", MAX_ENTRIES), ("dump",), ("off",)]
    assert module.recorded == [3, 4]
    assert "segments" in pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes())
    assert report.notes == []


def test_a_fit_that_ends_within_the_window_still_writes_its_snapshot(recorder, tmp_path):
    fit(Automatic(), MemoryProfiler(snapshot=True, steps=50, dirpath=tmp_path, figure=False))
    assert recorder == [("on", MAX_ENTRIES), ("dump",), ("off",)]


def test_recording_is_switched_off_when_the_fit_raises(recorder, tmp_path):
    module = Automatic()
    module.fail_at = 4
    callback = MemoryProfiler(snapshot=True, dirpath=tmp_path)
    with pytest.raises(KeyError, match="broken on purpose"):
        trainer_for(callback).fit(module, loader())
    assert recorder == [("on", MAX_ENTRIES), ("off",)]
    assert not list(tmp_path.iterdir())


def test_recording_is_switched_off_when_the_snapshot_cannot_be_written(recorder, tmp_path, monkeypatch):
    def full(filename):
        raise OSError("no space left")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    history = AllocatorHistory()
    history.start()
    with pytest.raises(OSError, match="no space left"):
        history.write(tmp_path / "snapshot.pickle")
    assert recorder == [("on", MAX_ENTRIES), ("off",)]
    assert not list(tmp_path.iterdir())


def test_a_recorder_that_somebody_else_switched_on_stays_on(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    fit(Automatic(), MemoryProfiler(snapshot=True, dirpath=tmp_path, figure=False))
    assert recorder == [("dump",)]


def test_nothing_is_recorded_unless_asked_for(recorder, tmp_path):
    fit(Automatic(), MemoryProfiler(dirpath=tmp_path, figure=False))
    assert recorder == []


def test_without_a_folder_nothing_is_recorded_and_the_report_says_so(recorder):
    report = fit(Automatic(), MemoryProfiler(snapshot=True))
    assert recorder == []
    assert "no dirpath" in report.notes[0]


def test_without_cuda_the_report_says_that_there_is_no_snapshot(tmp_path):
    report = fit(Automatic(), MemoryProfiler(snapshot=True, dirpath=tmp_path, figure=False))
    assert report.notes == ["No CUDA device: no snapshot of the allocator's history."]
    assert [path.name for path in tmp_path.iterdir()] == ["memory.json"]
