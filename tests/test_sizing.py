from __future__ import annotations

import pytest
import torch

from lightning_sonar import MODES
from lightning_sonar.memory import sizing


@pytest.mark.parametrize(
    ("mode", "paper_gb"),
    [("standard", 55.55), ("standard_no_expert_clip", 55.55), ("in_backward_all", 43.35), ("sonar", 43.57)],
)
def test_arithmetic_stays_within_its_margin_of_the_papers_peaks(mode, paper_gb):
    need = sizing.training_requirement(6_919_161_856, 6_442_450_944, MODES[mode], torch.bfloat16)
    without_margin = need.total / (1 + sizing.MARGIN)
    assert without_margin < paper_gb * 1e9 < need.total


def test_requirement_counts_each_part():
    need = sizing.training_requirement(100, 80, MODES["sonar"], torch.float32)
    assert (need.parameters, need.gradients, need.states) == (400, 80, 800)
    assert "about 0.0 GB (parameters 0.0, optimizer states 0.0, gradients 0.0, and 10% for the rest)" in str(need)


def test_memory_there_honours_the_cgroup_limit(monkeypatch):
    monkeypatch.setattr(sizing, "_cgroup_limit", lambda: None)
    free = sizing.memory_there(torch.device("cpu"))
    assert free > 1e8
    monkeypatch.setattr(sizing, "_cgroup_limit", lambda: 2**33 // 8)
    assert sizing.memory_there(torch.device("cpu")) < min(free, 2**30)


def test_a_local_folder_is_reachable_and_an_unknown_checkpoint_offline_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert sizing.checkpoint_reachable(str(tmp_path))
    assert not sizing.checkpoint_reachable("nobody/nothing-at-all")
