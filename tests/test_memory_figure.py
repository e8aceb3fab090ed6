"""The memory figure: what it shows, for steps of any size, and that it leaves matplotlib alone."""

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightning_sonar.memory import MemoryReport, StorageTracker, draw_memory
from lightning_sonar.memory.report import report_of


def small_report(numel=250_000):
    """A step by hand: parameters, activations, a gradient that is freed, an update."""
    with StorageTracker() as tracker:
        weight = torch.zeros(numel)
        tracker.label(weight, "parameters")
        tracker.mark("forward")
        activation = torch.empty(2 * numel)
        tracker.mark("backward")
        for _ in range(3):
            gradient = torch.zeros(numel)
            tracker.label(gradient, "expert_gradients")
            del gradient
        del activation
        tracker.mark("step")
        weight.add_(1)
        tracker.mark("done")
    return report_of(tracker.ledger, device="cpu")


@pytest.fixture
def drawn(monkeypatch):
    """Every text that is put on the figure."""
    figures = []
    plain = Figure.savefig

    def remember(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        figures.append(self)

    monkeypatch.setattr(Figure, "savefig", remember)

    def texts():
        (axes,) = figures[-1].axes
        legend = axes.get_legend().get_texts()
        shown = [*axes.texts, *legend, axes.title, axes.xaxis.label, axes.yaxis.label]
        return [text.get_text() for text in shown]

    return texts


def test_figure_names_peak_phases_labels_and_units(tmp_path, drawn):
    report = small_report()
    assert report.peak_bytes == 4_000_000
    draw_memory(report, tmp_path / "memory.png")
    texts = " | ".join(drawn())
    for word in ("peak 4 MB in backward", "forward", "backward", "live memory (MB", "(ms"):
        assert word in texts
    for label in ("parameters", "expert gradients", "activations and other"):
        assert label in texts
    assert "dense gradients" not in texts
    height, width = imread(tmp_path / "memory.png").shape[:2]
    assert min(height, width) >= 600


def test_a_dictionary_and_a_title_will_do(tmp_path, drawn):
    draw_memory(small_report().to_dict(), tmp_path / "memory.png", title="OLMoE, sonar")
    assert "OLMoE, sonar" in drawn()


def test_large_steps_are_drawn_in_gigabytes(tmp_path, drawn):
    data = small_report().to_dict()
    timeline = data["timeline"]
    data["peak_bytes"] *= 10_000
    timeline["live_bytes"] = [value * 10_000 for value in timeline["live_bytes"]]
    timeline["by_label"] = {k: [v * 10_000 for v in values] for k, values in timeline["by_label"].items()}
    draw_memory(data, tmp_path / "memory.png")
    assert "peak 40 GB in backward" in " ".join(drawn())


def test_many_microbatches_leave_out_names_rather_than_overlap(tmp_path, drawn):
    data = small_report().to_dict()
    end = data["timeline"]["phases"][-1]["end_ms"]
    data["timeline"]["phases"] = [
        {
            "phase": "backward" if index % 2 else "forward",
            "start_ms": index * end / 200,
            "end_ms": (index + 1) * end / 200,
            "peak_bytes": 1,
        }
        for index in range(200)
    ]
    draw_memory(data, tmp_path / "memory.png")
    names = [text for text in drawn() if text in ("forward", "backward")]
    assert 2 <= len(names) <= 25


def test_the_report_of_a_step_adds_up():
    report = small_report()
    assert isinstance(report, MemoryReport)
    assert report.peak_per_phase == {
        "forward": 3_000_000,
        "backward": 4_000_000,
        "step": 1_000_000,
        "done": 1_000_000,
    }
    assert report.split == {
        "parameters": 1_000_000,
        "optimizer_state": 0,
        "expert_gradients": 1_000_000,
        "dense_gradients": 0,
        "activations_and_other": 2_000_000,
    }
    assert (report.peak_phase, report.peak_op) == ("backward", "aten.zeros.default")
    assert (report.peak_expert_gradients, report.peak_expert_gradient_bytes) == (1, 1_000_000)


def test_allocator_peaks_take_precedence_and_the_rest_is_untracked():
    with StorageTracker() as tracker:
        tracker.mark("forward")
        x = torch.empty(100)
        tracker.mark("backward")
        y = torch.empty(100)
    report = report_of(tracker.ledger, device="cuda:0", allocator_peaks={"forward": 1500, "backward": 1000})
    assert (report.peak_bytes, report.peak_phase) == (1500, "forward")
    assert report.split["untracked"] == 1500 - 400
    assert sum(report.split.values()) == report.peak_bytes
    assert report.source == "cuda caching allocator"
    del x, y


def test_drawing_leaves_pyplot_alone(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    draw_memory(small_report(), tmp_path / "memory.png")
    assert pyplot.get_fignums() == before
