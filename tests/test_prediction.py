"""A predicted peak beside the measured one, the peaks of all ranks, and fits without a logger."""

import json

import pytest
from test_profiler import Automatic, fit, loader, trainer_for

from lightning_sonar.memory import MemoryProfiler
from lightning_sonar.memory.ranks import of_all_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture(scope="module")
def peak():
    return fit(Automatic()).peak_bytes


def predicting(nbytes):
    callback = MemoryProfiler()
    callback.predicted_peak_bytes = nbytes
    return callback


@pytest.mark.parametrize("share", [0.96, 1.0, 1.04])
def test_a_prediction_within_5_percent_is_reported_without_a_word(peak, share):
    predicted = int(peak * share)
    report = fit(Automatic(), predicting(predicted))
    assert report.predicted_peak_bytes == predicted
    assert report.prediction_gap == (peak - predicted) / predicted
    assert report.notes == []


@pytest.mark.parametrize(("share", "sign"), [(0.9, r"\+11\.1%"), (1.25, r"-20\.0%")])
def test_a_prediction_further_off_warns_with_both_figures(peak, share, sign):
    with pytest.warns(UserWarning, match=rf"measured peak is [\d.]+ kB, {sign} off the predicted [\d.]+ kB"):
        report = fit(Automatic(), predicting(int(peak * share)))
    assert len(report.notes) == 1
    assert abs(report.prediction_gap) > 0.05


def test_without_a_prediction_the_report_has_none(peak):
    report = fit(Automatic())
    assert (report.predicted_peak_bytes, report.prediction_gap) == (None, None)
    assert json.loads(json.dumps(report.to_dict()))["prediction_gap"] is None


def test_a_prediction_of_nothing_is_refused_before_training():
    with pytest.raises(ValueError, match="predicted_peak_bytes = 0: expected bytes, more than 0"):
        trainer_for(predicting(0)).fit(Automatic(), loader())


def test_the_callback_needs_no_logger(tmp_path):
    callback = MemoryProfiler(dirpath=tmp_path)
    trainer = trainer_for(callback, logger=False)
    trainer.fit(Automatic(), loader())
    assert trainer.loggers == []
    assert callback.report is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.json", "memory.png"]


def test_one_rank_alone_has_no_figures_by_rank():
    assert of_all_ranks(1, 1) is None
    assert of_all_ranks(1, 2) is None  # no process group
    report = fit(Automatic())
    assert (report.peak_bytes_per_rank, report.peak_expert_gradient_bytes_per_rank) == (None, None)


class Uneven(Automatic):
    """Rank 1 holds more than rank 0."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            batch = batch.repeat(8, 1)
        return super().training_step(batch, batch_idx)


class Forgetful(MemoryProfiler):
    """Rank 1 has nothing to report."""

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 1:
            self._best = None
        super().on_train_end(trainer, pl_module)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MemoryProfiler, Forgetful])
def test_two_ranks_report_the_peaks_of_both(tmp_path, kind):
    callback = kind(dirpath=tmp_path, figure=False)
    trainer_for(callback, devices=2, strategy="ddp_spawn").fit(Uneven(), loader())
    report = json.loads((tmp_path / "memory.json").read_text())
    first, second = report["peak_bytes_per_rank"]
    assert first == report["peak_bytes"]
    experts = report["peak_expert_gradient_bytes_per_rank"]
    assert experts[0] == report["peak_expert_gradient_bytes"] > 0
    if kind is Forgetful:
        assert second is experts[1] is None
    else:
        assert second > first
        assert experts[1] == experts[0]
