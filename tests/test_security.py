"""What comes from outside runs nothing, leaks nothing and writes nowhere else: configurations, models, code."""

from __future__ import annotations

import ast
import inspect
import io
import json
import tomllib
from pathlib import Path

import lightning as L
import pytest
from config_space import composed, run
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from security_cases import small_run

from experiments import job
from experiments.environment import as_given, environment_references, with_references
from experiments.outputs import keep_inside
from experiments.settings import SettingsError, check_values
from experiments.status import write_text
from experiments.trying import make_trainer
from lightning_sonar import models, plan_memory
from lightning_sonar.config_dir import config_dir
from lightning_sonar.data import DataError

ROOT = Path(__file__).resolve().parent.parent


WRITERS = ["callbacks=checkpoint", "logger=csv"]

# --- the command


def test_a_value_of_the_environment_is_used_and_never_written_down(tmp_path, monkeypatch):
    secret = "correct-horse-battery-staple"
    monkeypatch.setenv("SONAR_TEST_SECRET", secret)
    cache = tmp_path / secret
    given = ["data.cache_dir=${oc.env:SONAR_TEST_SECRET}", "+model.overrides.name_or_path=${data.cache_dir}"]
    monkeypatch.chdir(tmp_path)
    ended = run([*small_run(tmp_path), *given, *WRITERS, "callbacks.memory_profiler=null"], tmp_path / "run")
    assert ended.kind == "trained", ended.message
    assert cache.is_dir()  # it was used
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "result.json", "last.ckpt"} <= {path.name for path in files}
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    written = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert OmegaConf.to_container(written)["data"]["cache_dir"] == "${oc.env:SONAR_TEST_SECRET}"  # type: ignore[index,call-overload]
    assert written.data.cache_dir == secret


def test_references_to_the_environment_are_found_through_others_and_in_lists(monkeypatch):
    monkeypatch.setenv("SONAR_TEST_SECRET", "hidden")
    env = "${oc.env:SONAR_TEST_SECRET}"
    cfg = OmegaConf.create(
        {
            "a": {"key": env, "n": 1, "none": None},
            "b": "${a.key}",
            "c": [env, {"d": "x/${b}"}],
            "e": "${a}",
            "f": "${a.n}",
        }
    )
    references = environment_references(cfg)
    assert OmegaConf.to_container(cfg)["b"] == "${a.key}"  # type: ignore[call-overload,index]
    OmegaConf.resolve(cfg)
    assert cfg.c[1].d == "x/hidden"
    assert with_references(cfg, references) == {
        "a": {"key": env, "n": 1, "none": None},
        "b": "${a.key}",
        "c": [env, {"d": "x/${b}"}],
        "e": {"key": env, "n": 1, "none": None},
        "f": 1,
    }
    assert OmegaConf.create({"a": env}).a == "hidden"  # the resolver is itself again


def test_overrides_are_resolved_but_for_those_that_ask_for_the_environment(monkeypatch):
    monkeypatch.setenv("SONAR_TEST_SECRET", "hidden")
    env = "${oc.env:SONAR_TEST_SECRET}"
    cfg = OmegaConf.create({"num": 3, "task": ["seed=${num}", f"data.cache_dir={env}", "a=b"], "key": env})
    cfg.task.append("b=${key}")
    assert as_given(cfg.task) == ["seed=3", f"data.cache_dir={env}", "a=b", "b=${key}"]


@pytest.mark.parametrize(
    ("override", "key", "place"),
    [
        ("callbacks.model_checkpoint.dirpath=kept", "callbacks.model_checkpoint.dirpath", "kept"),
        ("callbacks.model_checkpoint.dirpath=./a/../kept", "callbacks.model_checkpoint.dirpath", "kept"),
        ("callbacks.memory_profiler.dirpath=.", "callbacks.memory_profiler.dirpath", "."),
        ("logger.csv.save_dir=logs", "logger.csv.save_dir", "logs"),
        ("trainer.default_root_dir=lightning", "trainer.default_root_dir", "lightning"),
        ("trainer.default_root_dir=null", "trainer.default_root_dir", "."),
        ("logger=csv", "trainer.profiler.dirpath", "profile"),
    ],
)
def test_relative_paths_begin_in_the_runs_folder(tmp_path, override, key, place):
    cfg = composed([*WRITERS, override], tmp_path)
    OmegaConf.update(cfg, "trainer.profiler", {"_target_": "x", "dirpath": "profile"}, force_add=True)
    OmegaConf.resolve(cfg)
    keep_inside(cfg, tmp_path)
    assert Path(OmegaConf.select(cfg, key)) == (tmp_path / place).resolve()


@pytest.mark.parametrize("path", ["/elsewhere/kept", "~/kept", "s3://bucket/kept", "file:///elsewhere"])
def test_a_path_that_is_meant_stays_as_it_is(tmp_path, path):
    cfg = composed([*WRITERS, f"callbacks.model_checkpoint.dirpath='{path}'"], tmp_path)
    OmegaConf.resolve(cfg)
    keep_inside(cfg, tmp_path)
    assert cfg.callbacks.model_checkpoint.dirpath == path


@pytest.mark.parametrize(
    "override",
    [
        "callbacks.model_checkpoint.dirpath=../kept",
        "callbacks.model_checkpoint.dirpath=a/../../kept",
        "callbacks.model_checkpoint.filename=../../step",
        "callbacks.model_checkpoint.filename=/elsewhere/step",
        "callbacks.memory_profiler.dirpath=..",
        "logger.csv.save_dir=../..",
        "logger.csv.name=../../metrics",
        "logger.csv.version=..",
        "trainer.default_root_dir=../up",
    ],
)
def test_a_relative_path_that_leads_out_of_the_folder_is_refused_by_its_key(tmp_path, override):
    cfg = composed([*WRITERS, override], tmp_path)
    OmegaConf.resolve(cfg)
    with pytest.raises(SettingsError, match="leads out of the") as caught:
        keep_inside(cfg, tmp_path)
    assert str(caught.value).startswith(f"{override}: ")


def test_a_run_with_relative_paths_writes_into_its_folder_only(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    given = ["logger=csv", "logger.csv.save_dir=logs", "logger.csv.name=a/b", "trainer.default_root_dir=null"]
    given += ["+callbacks.kept._target_=lightning.pytorch.callbacks.ModelCheckpoint", "+callbacks.kept.dirpath=kept"]
    ended = run([*small_run(tmp_path), *given, "trainer.enable_checkpointing=true"], tmp_path / "run")
    assert ended.kind == "trained", ended.message
    assert list((tmp_path / "run" / "kept").glob("*.ckpt"))
    assert list((tmp_path / "run" / "logs" / "a" / "b").rglob("metrics.csv"))
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.parametrize("name", ["\udcff", "a\x1b[31m", "[/]", "🦙"])
def test_a_name_that_cannot_be_printed_ends_in_a_message_all_the_same(tmp_path, monkeypatch, name):
    def train(cfg, folder):
        raise DataError(f"{name}.jsonl: no such file; expected a .jsonl file")

    monkeypatch.setattr(job, "train", train)
    # As Python's own is.
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace"))
    assert job.run_job(None, tmp_path) == 2  # type: ignore[arg-type]
    assert "no such file" in (tmp_path / "error.txt").read_text(encoding="utf-8")


def test_text_with_half_characters_can_be_written(tmp_path):
    write_text(tmp_path / "a.txt", "a\udcffb")
    assert (tmp_path / "a.txt").read_text() == "a\\udcffb"


# --- code that comes with a model


def test_code_of_others_is_off_everywhere_unless_it_is_asked_for():
    for path in sorted((config_dir() / "model").glob("*.yaml")):
        line = next(line for line in path.read_text().splitlines() if line.startswith("trust_remote_code:"))
        assert OmegaConf.load(path).trust_remote_code is False
        assert "may run, with all your rights" in line
    for function in (models.build, models.build_config, models.count_parameters, plan_memory):
        assert inspect.signature(function).parameters["trust_remote_code"].default is False


@pytest.mark.parametrize("value", ["no", "off", "'False'", "'false'", "0", "1", "null", "yes", "[]"])
def test_only_true_and_false_say_whether_code_of_others_may_run(tmp_path, value):
    cfg = composed([f"model.trust_remote_code={value}"], tmp_path)
    with pytest.raises(SettingsError, match=r"model\.trust_remote_code="):
        check_values(cfg)


@pytest.mark.parametrize("key", ["model_id", "config"])
def test_code_beside_a_checkpoint_is_not_run_and_the_error_says_what_trust_means(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": {"AutoConfig": "code.Odd"}}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="code of its own, which was not run.*runs it with all your rights") as caught:
        models.build_config("hf", "full", **{key: str(tmp_path)})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


# --- the code itself

OWN_FILES = {
    # Files that the process itself has just written.
    "experiments/peers/base.py": "torch.load without weights_only",
    "experiments/peers/trainers.py": "weights_only=False",
}

FORBIDDEN = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"}
FORBIDDEN |= {"marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp"}
FORBIDDEN |= {"subprocess.getoutput", "subprocess.getstatusoutput", "joblib.load", "dill.load", "dill.loads"}


def dangers(source: str) -> list[str]:
    """What in a source could run text or a pickle that comes from outside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in FORBIDDEN or name.startswith(("os.exec", "os.spawn")):
            found.append(name)
        if given.get("shell", "False") != "False":
            found.append("shell=True")
        if given.get("allow_pickle", "False") != "False":
            found.append("allow_pickle")
        if name == "torch.load" and given.get("weights_only", "True") != "True":
            found.append("torch.load without weights_only")
        elif given.get("weights_only") == "False" and not name.endswith("save_checkpoint"):
            found.append("weights_only=False")
        if given.get("trust_remote_code") == "True":
            found.append("trust_remote_code=True")
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("eval(text)", ["eval"]),
        ("import os\nos.system(command)", ["os.system"]),
        ("subprocess.run(command, shell=True)", ["shell=True"]),
        ("subprocess.run(command, shell=wanted)", ["shell=True"]),
        ("torch.load(path, weights_only=False)", ["torch.load without weights_only"]),
        ("trainer.fit(module, ckpt_path=path, weights_only=False)", ["weights_only=False"]),
        ("yaml.load(text)", ["yaml.load"]),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", ["trust_remote_code=True"]),
        ("model.eval()\nre.compile(text)\nsubprocess.run(command)\ntorch.load(path, weights_only=True)", []),
    ],
)
def test_the_search_for_dangerous_calls_finds_them(source, found):
    assert dangers(source) == found


def test_no_code_hands_outside_text_to_a_shell_to_eval_or_to_pickle():
    paths = [path for folder in ("lightning_sonar", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 100
    found = {}
    for path in paths:
        dangerous = dangers(path.read_text(encoding="utf-8"))
        if dangerous:
            found[path.relative_to(ROOT).as_posix()] = dangerous
    assert found == {name: [what] for name, what in OWN_FILES.items()}


# Releases that run code from a checkpoint, a configuration, a template or a data set, or were withdrawn.
BAD = {
    "torch": ["2.5.1", "2.9.1"],
    "lightning": ["2.5.0", "2.6.0", "2.6.2", "2.6.3"],
    "transformers": ["4.57.0", "5.2.0", "5.3.0"],
    "hydra-core": ["1.3.2", "1.3.5", "1.4.0"],
    "jinja2": ["3.1.4", "3.1.5"],
    "datasets": ["2.19.0", "3.6.0"],
}


def test_the_ranges_of_dependencies_leave_out_releases_known_to_be_bad():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {found.name: found.specifier for found in map(Requirement, project["dependencies"])}
    assert {name: [v for v in versions if v in ranges[name]] for name, versions in BAD.items()} == {n: [] for n in BAD}
    assert L.__version__ in ranges["lightning"]


@pytest.mark.parametrize("target", ["os.system", "subprocess.run", "builtins.eval", "logging.os.system"])
def test_a_configuration_cannot_name_a_shell_or_eval_as_what_to_make(tmp_path, target):
    cfg = composed(["callbacks=none", "logger=none", f"+callbacks.evil._target_={target}"], tmp_path)
    OmegaConf.update(cfg, "callbacks.evil._args_", [f"touch '{tmp_path}/ran'"], force_add=True)
    with pytest.raises(SettingsError, match="blocklisted"):
        make_trainer(cfg)
    assert not (tmp_path / "ran").exists()
