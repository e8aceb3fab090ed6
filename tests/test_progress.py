"""The progress bar counts steps, whatever an epoch, accumulation or a checkpoint does to batches."""

from __future__ import annotations

import pytest
from helpers import AutomaticLM, batches, fused, loader, make_trainer, small_model

from lightning_sonar import SonarMoEStrategy
from lightning_sonar.progress import StepProgressBar


def train(steps: int, ckpt_path=None, **options):
    """Fit three batches an epoch; the bar's tasks as (description, completed, total), and the trainer."""
    bar = StepProgressBar(leave=True)
    options = {"max_epochs": -1, "callbacks": [bar], "enable_progress_bar": True, **options}
    trainer = make_trainer(SonarMoEStrategy(mode="standard"), steps, **options)
    trainer.fit(AutomaticLM(small_model(), fused()), loader(batches(3)), ckpt_path=ckpt_path)
    return [(task.description, task.completed, task.total) for task in bar.progress.tasks], trainer


@pytest.mark.parametrize("steps", [2, 5])
def test_the_bar_counts_steps_over_several_epochs_in_one_line(steps):
    assert train(steps)[0] == [("Training", steps, steps)]


def test_the_bar_counts_steps_and_not_microbatches():
    assert train(2, accumulate_grad_batches=3)[0] == [("Training", 2, 2)]


def test_the_bar_of_a_run_that_goes_on_ends_at_its_last_step(tmp_path):
    _, trainer = train(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt", weights_only=False)
    assert train(3, ckpt_path=tmp_path / "two.ckpt")[0] == [("Training", 3, 3)]


def test_where_epochs_limit_the_run_the_bar_counts_the_epochs_batches():
    assert train(-1, max_epochs=2)[0] == [("Epoch 2 of 2", 3, 3)]
