"""Odd models train bit for bit as a plain loop trains them, or are refused in words."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import AutomaticLM, batches, differing, fused, loader, make_trainer, small_model, snapshot
from lightning.pytorch.callbacks import BaseFinetuning
from odd_cases import CASES, at_step_two, grow, load_in_its_place, unfreeze
from odd_models import (
    CLIP,
    Case,
    Growing,
    Shared,
    SomeLayers,
    frozen,
    in_backward,
    ordinary,
    outcome,
    parametrized,
    released,
)
from test_in_backward import Toy, inputs
from torch import nn

from lightning_sonar import FusedAdamW, SonarMoEStrategy, find_expert_tensors, release_in_backward
from lightning_sonar.host import is_host
from lightning_sonar.members import Members
from lightning_sonar.strategies.averaging import RankAverage
from lightning_sonar.strategies.sharding import expert_modules

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]
DENSE_CLIP = ("sonar", "sonar_per_expert")


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_a_plain_loop_does(name):
    case = CASES[name]
    wanted = {mode: ordinary(case, lambda is_expert: not is_expert) for mode in DENSE_CLIP}
    wanted["sonar_exact_clip"] = ordinary(case, lambda is_expert: True)
    wanted["in_backward_all"] = ordinary(case, lambda is_expert: False)
    if name != "no expert at all":  # there the loss is zero
        assert differing(wanted["sonar"], wanted["in_backward_all"]), "the clip does something"
    for mode, expected in wanted.items():
        if mode not in case.without:
            assert differing(in_backward(case, mode), expected) == [], mode


# Tensors that come later.


@pytest.mark.parametrize("name", ["unfrozen", "unfrozen into a group", "experts added", "replaced everywhere"])
def test_what_comes_later_is_updated_inside_backward_too(name):
    case = CASES[name]
    model, optimizer, handle = released(case)
    for step in range(3):
        loss = case.loss(model, optimizer, step)
        handle.backward(loss)
        experts = [model.first, model.second, getattr(model, "third", None)]
        assert all(tensor.grad is None for tensor in experts if tensor is not None)
        assert handle.hooks_fired == sum(t is not None and t.requires_grad for t in experts)
        handle.clip_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    assert not any(tensor._post_accumulate_grad_hooks for tensor in model.parameters())


@pytest.mark.filterwarnings("ignore:loss.backward.. was called directly:UserWarning")
def test_a_bare_loop_releases_what_comes_later_one_step_later():
    model, optimizer, _ = released(Case(frozen))
    for step in range(3):
        if step == 1:
            model.first.requires_grad_(True)
        model(inputs(step)).backward()
        assert (model.first.grad is not None) == (step == 1)
        optimizer.step()
        optimizer.zero_grad()


def test_a_tensor_that_has_the_id_of_one_that_is_gone_is_not_taken_for_it():
    gone, other = nn.Parameter(torch.zeros(4, 8, 8)), nn.Parameter(torch.zeros(3))
    members = Members({"gone": gone}, {})
    assert members.is_expert(gone)
    assert members.new([gone]) == [gone]
    # Which ids are used again is the interpreter's business, so the books are turned to the other's.
    for book in (members._experts, members._seen):
        book[id(other)] = book.pop(id(gone))
    del gone
    assert not members.is_expert(other)
    assert members.new([other]) == [other]
    assert members.experts == {}


@pytest.mark.parametrize("accumulation", ["exact", "host"])
def test_states_and_sums_in_host_memory_take_what_comes_later(accumulation):
    case = Case(Growing, at_step_two(grow))
    results = []
    for mode, options in (
        ("standard_no_expert_clip", {}),
        ("sonar", {"expert_state_device": "cpu", "accumulation": accumulation}),
    ):
        model, optimizer, handle = released(case, mode, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(4):
                handle.train_step(case.loss(model, optimizer, step) / 2, last=False)
                handle.train_step(model(inputs(step + 9)) / 2, max_norm=CLIP)
        results.append(outcome(model, optimizer))
    # Sums in host memory are float32, as the gradients are.
    assert differing(*results) == []
    assert is_host(optimizer.state[model.third]["exp_avg"].untyped_storage())


class Thaw(BaseFinetuning):
    """Freezes some layers' experts, or all experts, and unfreezes them in the second epoch."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern

    def _parts(self, module):
        return [part for name, part in module.named_modules() if name.endswith(self.pattern)]

    def freeze_before_training(self, pl_module):
        self.freeze(self._parts(pl_module))

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(self._parts(pl_module), optimizer, lr=1e-2)


class TrainedOnly(AutomaticLM):
    """Counts expert gradients that are there between backward and the clip."""

    def __init__(self, model) -> None:
        super().__init__(model, lambda parameters: fused()([p for p in parameters if p.requires_grad]))
        self.left: list[int] = []

    def on_before_optimizer_step(self, optimizer):
        self.left.append(sum(".experts." in name and p.grad is not None for name, p in self.model.named_parameters()))


@pytest.mark.parametrize("pattern", ["layers.0.mlp.experts", "mlp.experts"])
def test_a_finetuning_callback_may_thaw_experts(pattern):
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        module = TrainedOnly(small_model())
        trainer = make_trainer(SonarMoEStrategy(mode=mode), callbacks=[Thaw(pattern)], max_epochs=3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The provided params to be frozen already exist")
            trainer.fit(module, loader(batches(2)))
        results.append(snapshot(trainer, module))
        frozen_first = 4 if pattern == "mlp.experts" else 2
        wanted = [4 - frozen_first] * 2 + [4] * 4 if mode != "sonar" else [0] * 6
        assert module.left == wanted
    assert differing(*results) == []


def test_thawed_experts_stay_out_of_the_clip():
    """Of modes without hooks, too, by a loop of plain PyTorch."""
    case = Case(frozen, at_step_two(unfreeze))
    clipped = ordinary(case, lambda is_expert: not is_expert)
    assert differing(in_backward(case, "standard_no_expert_clip"), clipped) == []


# Hooks of others.


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "in_backward_all"])
def test_somebodys_hook_after_ours_sees_the_gradient(mode):
    seen = []
    for name in ("standard_no_expert_clip", mode):
        model, _, handle = released(Case(Toy), name)
        norms: list[float] = []
        for tensor in model.parameters():
            tensor.register_post_accumulate_grad_hook(lambda t, norms=norms: norms.append(float(t.grad.norm())))
        for step in range(3):
            handle.train_step(model(inputs(step)))
        seen.append(norms)
    assert len(seen[0]) == 12
    assert seen[0] == seen[1]


def test_somebodys_hook_after_ours_is_refused_in_a_bare_loop():
    model, optimizer, _ = released(Case(Toy), on_nonfinite="ignore")
    model.second.register_post_accumulate_grad_hook(lambda _: None)
    before = model.second.detach().clone()
    with pytest.raises(RuntimeError, match=r"was put on second after it was released.*handle.backward\(loss\)"):
        model(inputs()).backward()
    assert torch.equal(before, model.second)
    assert not optimizer.state


def test_backward_may_run_in_another_thread():
    model, optimizer, handle = released(Case(Toy))
    for step in range(4):
        torch.manual_seed(step)
        loss = model(inputs(step))
        thread = threading.Thread(target=lambda loss=loss: handle.train_step(loss, max_norm=CLIP))
        thread.start()
        thread.join()
    torch.manual_seed(0)
    assert differing(outcome(model, optimizer), ordinary(Case(Toy), lambda is_expert: not is_expert)) == []


def test_a_graph_may_be_gone_through_twice_if_the_first_time_only_adds_up():
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        model, optimizer, handle = released(Case(Toy), mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(3):
                loss = model(inputs(step))
                with handle.accumulate():
                    for _ in range(2):
                        handle.backward(loss, lambda loss=loss: loss.backward(retain_graph=True))
                handle.train_step(loss, max_norm=CLIP)
        results.append(outcome(model, optimizer))
    assert differing(*results) == []


# What is found.


def test_parametrized_tensors_and_those_in_lists_are_found():
    assert find_expert_tensors(parametrized("first", "second")()).names == [
        "parametrizations.first.original",
        "parametrizations.second.original",
    ]
    found = find_expert_tensors(parametrized("first")())
    assert sorted(found.names) == ["parametrizations.first.original", "second"]
    model = nn.Sequential(CASES["in lists"].build())
    found = find_expert_tensors(model)
    assert found.names == ["0.first_list.0", "0.second_dict.only"]
    assert expert_modules(model, found.names) == [model[0]], "what FSDP2 shards has a forward"


def test_a_step_with_slices_of_a_transposed_tensor_keeps_its_layout():
    model, optimizer, handle = released(CASES["transposed"], "sonar_per_expert")
    handle.train_step(model(inputs()))
    state = optimizer.state[model.first]
    assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == model.first.stride()


def test_an_average_over_ranks_keeps_the_layout_and_knows_what_comes_and_what_is_frozen():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, late = (nn.Parameter(torch.zeros(4, 3, 2)) for _ in range(2))
        average = RankAverage({"first": first}, SimpleNamespace(group=dist.group.WORLD))  # type: ignore[arg-type]
        average.admit("late", late)
        first.grad = torch.arange(24.0).reshape(4, 2, 3).mT
        late.grad = torch.ones(4, 3, 2)
        kept = first.grad.clone()
        assert average.take(late) == []
        assert average.take(first) == [first, late]
        assert first.grad.stride() == (6, 1, 3)
        assert torch.equal(first.grad, kept)
        assert average.finish() == []
        first.requires_grad_(False)
        assert average.take(late) == [late], "nobody waits for a tensor that has been frozen"
        assert average.finish() == []
    finally:
        dist.destroy_process_group()


# Compiled models.


@pytest.mark.parametrize("compiled", ["whole", "wrapped", "by layer", "one layer"])
def test_a_model_compiled_as_a_whole_is_warned_of_and_layers_are_not(compiled):
    model = SomeLayers() if compiled != "one layer" else Shared()
    if compiled == "wrapped":
        model = nn.Sequential(torch.compile(model, backend="eager"))
    elif compiled == "by layer":
        for layer in model.layers:
            layer.compile(backend="eager")
    else:
        model.compile(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = FusedAdamW(model.parameters())
        release_in_backward(optimizer, find_expert_tensors(model)).remove()
        release_in_backward(optimizer, find_expert_tensors(model), mode="standard")
    said = [str(warning.message) for warning in caught]
    if compiled in ("whole", "wrapped"):
        (text,) = said
        assert "compiled as a whole and holds the experts of 2 layers" in text
        assert "layer.compile()" in text
    else:
        assert said == []


@pytest.mark.filterwarnings("ignore:.*is compiled as a whole:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("mode", "backend", "whole"),
    [
        ("sonar", "eager", False),
        *(pytest.param("sonar", "aot_eager", whole, marks=pytest.mark.slow) for whole in (False, True)),
        pytest.param("sonar_exact_clip", "eager", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_models_train_bitwise_alike(mode, backend, whole):
    def build():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = SomeLayers()
        for module in [model] if whole else model.layers:
            module.compile(backend=backend)
        return model

    case = Case(build)
    expected = ordinary(case, lambda is_expert: mode == "sonar_exact_clip" or not is_expert)
    assert differing(in_backward(case, mode), expected) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_lightning_module_trains_bitwise_alike_and_is_warned_of():
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        torch._dynamo.reset()
        module = AutomaticLM(small_model(), fused())
        trainer = make_trainer(SonarMoEStrategy(mode=mode), 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(torch.compile(module, backend="eager"), loader(batches(2)))
        said = [w for w in caught if "compiled as a whole" in str(w.message)]
        assert len(said) == (mode == "sonar")
        results.append(snapshot(trainer, module))
    assert differing(*results) == []


# Adapters.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("patterns", ["auto", r"experts.*lora_"])
def test_adapters_on_experts_train_beside_experts_or_in_their_place(patterns):
    peft = pytest.importorskip("peft")

    def build():
        config = peft.LoraConfig(
            r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(small_model(), config)
        for name, tensor in model.named_parameters():
            if patterns == "auto" and name.endswith("_proj"):
                tensor.requires_grad_(True)
        return model

    def loss(model, optimizer, step):
        batch = batches(4)[step]
        return model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss

    experts = r"(gate_up_proj|down_proj)$" if patterns == "auto" else patterns
    case = Case(build, loss, experts=experts, patterns=patterns)
    for mode in DENSE_CLIP:
        assert differing(in_backward(case, mode), ordinary(case, lambda is_expert: not is_expert)) == []
    if patterns != "auto":
        with pytest.raises(ValueError, match=r"All expert tensors .* are frozen.*LoRA.*experts=<regex"):
            find_expert_tensors(build())


def test_a_model_loaded_in_its_place_trains_nothing_more_of_the_old_one():
    """As in plain PyTorch: the optimizer holds the old tensors."""
    model, optimizer, handle = released(Case(Toy))
    load_in_its_place(model, optimizer)
    before = model.first.detach().clone()
    handle.train_step(model(inputs()))
    assert torch.equal(before, model.first)


@pytest.mark.parametrize("take", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"])
def test_a_copy_of_model_and_optimizer_carries_no_hooks_and_trains_as_ever(take):
    model, optimizer, handle = released(Case(Toy))
    handle.train_step(model(inputs(0)))
    copied, its_optimizer = take((model, optimizer))
    copied(inputs(1)).backward()
    assert copied.first.grad is not None
    its_optimizer.step()
    handle.train_step(model(inputs(1)))
    assert differing(outcome(copied, its_optimizer), outcome(model, optimizer)) == []
