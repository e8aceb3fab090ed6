from __future__ import annotations

import inspect
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from experiments.choices import comment_of, explain
from experiments.overrides import OverrideError, check_overrides, split_arguments
from experiments.settings import SettingsError, check_values, settle, try_optimizer
from lightning_sonar import MODES, SonarMoEStrategy
from lightning_sonar.config_dir import config_dir

CONF = config_dir()
GROUPS = ["model", "mode", "backend", "data", "optimizer", "scheduler", "trainer", "callbacks", "logger", "experiment"]
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def composed(*overrides: str):
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides), return_hydra_config=True)
    cfg.hydra.runtime.output_dir = "nowhere"
    from hydra.core.hydra_config import HydraConfig

    HydraConfig.instance().set_config(cfg)
    return cfg


def needed(group: str, name: str) -> list[str]:
    required = {("model", "hf"): ["model.id=somewhere"], ("data", "json"): ["data.path=file.json"]}
    return [f"{group}={name}", *required.get((group, name), [])]


def test_every_group_has_configs():
    assert {group for group, _ in CHOICES} == set(GROUPS)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_config_composes_resolves_and_names_things_that_exist(group, name):
    cfg = composed(*needed(group, name))
    OmegaConf.to_container(cfg.get(group, cfg.trainer), resolve=True)
    targets = []

    def collect(node):
        if OmegaConf.is_dict(node):
            if "_target_" in node:
                targets.append(node._target_)
            for key in node:
                if not OmegaConf.is_missing(node, key):
                    collect(node._get_node(key) if OmegaConf.is_interpolation(node, key) else node[key])

    for key in GROUPS:
        if key in cfg:
            collect(cfg[key])
    for target in targets:
        if "TensorBoard" not in target:
            assert callable(get_object(target))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_instantiates_its_strategy(mode):
    cfg = composed(f"mode={mode}")
    strategy = instantiate(cfg.trainer.strategy)
    assert isinstance(strategy, SonarMoEStrategy)
    assert strategy.mode == MODES[mode]


def test_every_mode_of_the_package_has_a_config_and_the_reverse():
    assert {path.stem for path in (CONF / "mode").glob("*.yaml")} == set(MODES)


def test_in_backward_all_sets_the_clip_value_to_null():
    assert composed("mode=in_backward_all").trainer.gradient_clip_val is None
    assert composed("mode=sonar").trainer.gradient_clip_val == 1.0


@pytest.mark.parametrize("optimizer", [name for group, name in CHOICES if group == "optimizer"])
@pytest.mark.parametrize("scheduler", [name for group, name in CHOICES if group == "scheduler"])
def test_every_optimizer_and_scheduler_instantiates(optimizer, scheduler):
    cfg = composed(f"optimizer={optimizer}", f"scheduler={scheduler}", "optimizer.lr=0.001", "trainer.max_steps=5")
    if optimizer == "flash_adamw" and not torch.cuda.is_available():
        pytest.skip("FlashAdamW is made on CUDA devices only")
    for package in ("torchao", "flashoptim"):
        if package in (CONF / "optimizer" / f"{optimizer}.yaml").read_text():
            pytest.importorskip(package)
    made = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2, 2, 2))])
    assert {group["weight_decay"] for group in made.param_groups} == {0.01}
    assert instantiate(cfg.scheduler)(made).get_last_lr()


def test_callbacks_trainer_and_logger_instantiate(tmp_path):
    cfg = composed("trainer.max_steps=1", "callbacks=checkpoint", f"trainer.default_root_dir='{tmp_path}'")
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=False)
    assert isinstance(trainer, L.Trainer)
    assert {type(callback).__name__ for callback in callbacks} == {
        "MemoryProfiler",
        "StepProgressBar",
        "RunCheckpoint",
    }


def test_every_argument_of_the_trainer_can_be_set():
    arguments = set(inspect.signature(L.Trainer.__init__).parameters) - {"self", "callbacks", "logger"}
    optional = {"enable_autolog_hparams", "model_registry"}  # newer than the oldest Lightning that is supported
    assert arguments - optional <= set(composed().trainer) - {"_target_"}
    assert set(composed().trainer) - {"_target_"} <= arguments


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.num_layer=2",
            r"'model' has no key 'num_layer'. Did you mean model.num_layers\? Valid keys there: .*size",
        ),
        ("trainer.max_step=5", r"'trainer' has no key 'max_step'. Did you mean trainer.max_steps"),
        ("sede=1", r"the configuration has no key 'sede'. Did you mean seed\? Valid keys there: .*trainer"),
        ("data.path.x=1", r"'data.path' has no key 'x'. It is a value and has no keys"),
        ("mode=sonnar", "mode=sonnar: there is no mode of that name. Choose one of in_backward_all, sonar"),
        ("optimiser=fused_adamw", "the configuration has no key 'optimiser'. Did you mean optimizer"),
        ("experiment=nothing", "there is no experiment of that name. Choose one of paper, "),
        ("model.overrides={hidden_size:3}", r"one by one with \+model.overrides.KEY=VALUE"),
        ("model.overrides.hidden_size=3", r"It is empty: add a key with \+model.overrides.hidden_size=3"),
        ("model.size=[", "The command line cannot be read"),
        (
            "hydra/launcher=job",
            r"no launcher of that name here.* pip install 'lightning-sonar\[sweep\]'. Here are",
        ),
        ("hydra/sweeper=optun", r"no sweeper of that name here.*\(joblib, .*; optuna\).* Here are: basic"),
        ("mode=null", "^mode=null: there is no mode of that name. Choose one of in_backward_all"),
        ("data=3", "^data=3: there is no data of that name"),
        ("~mode", "^~mode: .*'mode.name' not found, and the run's folder"),
        ("~model.name", "^~model.name: .*'model.name' not found, and the run's folder"),
        ("hydra.sweeper.params.mode='sonar,standard'", "^hydra.sweeper.params.mode=.*-m KEY=VALUE,VALUE"),
        ("hydra.sweeper.params={mode: sonar}", "^hydra.sweeper.params=.*-m KEY=VALUE,VALUE"),
    ],
)
def test_a_typo_is_answered_with_what_is_valid(override, message):
    with pytest.raises(OverrideError, match=message):
        check_overrides(["data.batch_size=2", override], CONF)


def test_every_choice_of_a_sweep_is_checked_before_anything_runs():
    check_overrides(["mode=standard,sonar", "backend=eager,grouped_mm", "seed=range(3)"], CONF)
    with pytest.raises(OverrideError, match="backend=eagre: there is no backend of that name"):
        check_overrides(["mode=standard,sonar", "backend=grouped_mm,eagre"], CONF)


def test_an_override_that_another_one_makes_valid_is_not_blamed():
    with pytest.raises(OverrideError, match="^model.num_layer=2"):
        check_overrides(
            ["callbacks=checkpoint", "callbacks.model_checkpoint.every_n_train_steps=3", "model.num_layer=2"], CONF
        )


def test_what_an_experiment_sweeps_over_may_be_set_beside_a_typo():
    overrides = ["experiment=paper_small", "hydra.sweeper.params.mode=sonar"]
    check_overrides(overrides, CONF)
    with pytest.raises(OverrideError, match="^data.foo=1: 'data' has no key 'foo'"):
        check_overrides([*overrides, "data.foo=1"], CONF)


def test_valid_overrides_pass():
    check_overrides(["model=granite", "+experiment=smoke"[1:], "trainer.max_steps=3", "hydra.run.dir=x"], CONF)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=json"], "data.path: a value is needed"),
        (["model=hf"], "model.id: a value is needed"),
        (["model=hf", "model.id=x", "model.size=tiny"], "model.size=tiny: model=hf has only the checkpoint's own size"),
        (["data.max_records=abc"], "data.max_records=abc: expected a whole number"),
        (["optimizer.lr=-1"], "optimizer.lr=-1: expected a number, at least 0, or null"),
        (["optimizer.lr=abc"], "optimizer.lr=abc: expected a number, at least 0, or null"),
        (["optimizer._target_=torch.optim.SDG"], "optimizer._target_=torch.optim.SDG: it cannot be made: .*SDG"),
        (["scheduler=onecycle", "trainer.max_epochs=1"], "scheduler=torch.optim.lr_scheduler.OneCycleLR: "),
        (["+model.overrides.hiden_size=3"], "has no value 'hiden_size'. Did you mean hidden_size"),
    ],
)
def test_a_mistake_is_found_before_data_is_read(overrides, message):
    with pytest.raises(SettingsError, match=message):
        settle(composed(*overrides), lambda _: None)


def test_a_checkpoint_that_is_no_moe_is_refused(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(SettingsError, match="model=hf: No batched expert tensors found"):
        settle(composed("model=hf", f"model.id='{tmp_path}'"), lambda _: None)


def test_flags_and_overrides_are_told_apart():
    assert split_arguments(["-m", "mode=sonar", "--config-dir", "x", "seed=1"]) == (
        ["-m", "--config-dir", "x"],
        ["mode=sonar", "seed=1"],
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.size=huge", "model.size=huge: expected one of auto, tiny, full"),
        ("data.batch_size=0", "data.batch_size=0: expected a whole number, at least 1"),
        ("data.batch_size=two", "data.batch_size=two: expected a whole number, at least 1"),
        ("trainer.max_steps=1.5", "trainer.max_steps=1.5: expected a whole number, at least -1, or null"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed: expected one of bf16-true, bf16-mixed, 32"),
        ("mode.accumulation=sometimes", "mode.accumulation=sometimes: expected one of exact, host, per_microbatch"),
        ("mode.expert_state_device=disk", "mode.expert_state_device=disk: expected one of null, cpu"),
        ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1: expected a number, at least 0, or null"),
        ("model.num_layers=true", "model.num_layers=true: expected a whole number"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_work(override, message):
    with pytest.raises(SettingsError, match=message):
        check_values(composed(override))


def test_states_that_nothing_would_stream_are_refused():
    with pytest.raises(SettingsError, match=r"expert_state_device='cpu' with mode 'standard'.*mode='sonar'"):
        check_values(composed("mode=standard", "mode.expert_state_device=cpu"))


def test_states_of_an_optimizer_that_is_not_known_to_be_element_wise_are_refused():
    cfg = composed("mode.expert_state_device=cpu", "model.size=tiny")
    cfg.optimizer = {"_target_": "torch.optim.Adafactor", "_partial_": True, "lr": 0.1}
    with pytest.raises(SettingsError, match="Adafactor is not known to be one"):
        try_optimizer(cfg)


def test_all_faults_are_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        check_values(composed("model.size=huge", "data.batch_size=0"))
    assert len(str(caught.value).splitlines()) == 2


def test_clip_with_nothing_to_clip_is_refused():
    with pytest.raises(SettingsError, match="trainer.gradient_clip_val=null"):
        check_values(composed("mode=in_backward_all", "trainer.gradient_clip_val=1.0"))


def test_auto_takes_tiny_on_a_cpu_and_says_so():
    said: list[str] = []
    cfg = settle(composed(), said.append)
    assert (cfg.model.size, cfg.backend.name, cfg.model.pretrained) == ("tiny", "grouped_mm", False)
    defaults = cfg.size_defaults.tiny
    assert (cfg.data.seq_len, cfg.optimizer.lr, cfg.trainer.max_steps) == (
        defaults.seq_len,
        defaults.lr,
        defaults.max_steps,
    )
    assert len(said) == 1
    assert "chose TINY, because there is no GPU" in said[0]
    assert "python experiments/plan.py model=olmoe" in said[0]
    assert "model.size=full" in said[0]


def test_given_values_win_over_the_sizes_defaults():
    cfg = settle(composed("data.seq_len=32", "optimizer.lr=0.5", "trainer.max_epochs=1"), lambda _: None)
    assert (cfg.data.seq_len, cfg.optimizer.lr, cfg.trainer.max_steps) == (32, 0.5, -1)


def test_full_size_that_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("experiments.settings.memory_there", lambda device: 20 * 10**9)
    with pytest.raises(
        SettingsError, match=r"model.size=full: .*needs 43.9 GB by the plan.*cpu has 20.0 GB free.*device_memory=20GB"
    ):
        settle(composed("model.size=full"))


def test_full_size_that_fits_is_taken(monkeypatch):
    monkeypatch.setattr("experiments.settings.memory_there", lambda device: 80 * 10**9)
    cfg = settle(composed("model.size=full"))
    assert (cfg.model.size, cfg.model.pretrained, cfg.data.seq_len) == ("full", True, 256)


@pytest.mark.parametrize(
    ("there", "reachable", "size", "why"),
    [
        (80, True, "full", "chose FULL:"),
        (40, True, "tiny", "because the GPU cannot hold it"),
        (80, False, "tiny", "because the checkpoint allenai/OLMoE-1B-7B-0924 cannot be reached"),
    ],
)
def test_auto_on_a_gpu_takes_full_if_it_fits_and_can_be_had(monkeypatch, there, reachable, size, why):
    monkeypatch.setattr("experiments.settings.device_of", lambda cfg: torch.device("cuda", 0))
    monkeypatch.setattr("experiments.settings.memory_there", lambda device: there * 10**9)
    monkeypatch.setattr("experiments.settings.checkpoint_reachable", lambda source: reachable)
    monkeypatch.setattr("experiments.settings.resolve_backend", lambda name, device: "grouped_mm")
    said: list[str] = []
    assert settle(composed(), said.append).model.size == size
    assert why in said[0]


def test_gpu_asked_for_where_there_is_none_is_refused():
    with pytest.raises(SettingsError, match="torch sees no GPU here. Use trainer.accelerator=cpu"):
        settle(composed("trainer.accelerator=gpu"))


def test_config_dir_is_found_in_the_checkout():
    assert config_dir() == Path(__file__).resolve().parent.parent / "conf"


def test_help_says_what_every_choice_is():
    text = explain(config_dir())
    for group in (path for path in config_dir().iterdir() if path.is_dir() and path.name != "hydra"):
        assert f"\n{group.name}=\n" in text
        for path in group.glob("*.yaml"):
            assert comment_of(path), f"{path} does not begin with a comment"
            assert f"\n  {path.stem} " in text
    assert "auto The best backend that runs on the device. batched_mm Batched matrix" in " ".join(text.split())
    assert "@package" not in text
