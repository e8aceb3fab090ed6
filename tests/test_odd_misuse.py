"""What updates inside backward cannot train is refused in words, before or in the first step."""

from __future__ import annotations

import pytest
import torch
from helpers import AutomaticLM, batches, fused, loader, make_trainer, small_model
from odd_cases import torch_adamw
from odd_models import Case, ListOfExperts, frozen, laid_out, released, with_gaps
from test_in_backward import Toy, inputs
from torch import nn

from lightning_sonar import FusedAdamW, SonarMoEStrategy

pytestmark = pytest.mark.usefixtures("deterministic")


def overlapping() -> Toy:
    model = Toy()
    memory = torch.randn(6, 8, 8)
    model.first, model.second = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    return model


def tied_by_data() -> Toy:
    model = Toy()
    model.second.data = model.first.data
    return model


def folded() -> Toy:
    model = Toy()
    model.first = nn.Parameter(torch.randn(1, 8, 8).expand(4, 8, 8))
    return model


SAME_MEMORY = r"first and second are two parameters in the same memory.*a\.weight = b\.weight"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(tied_by_data), SAME_MEMORY),
        (Case(overlapping), SAME_MEMORY),
        (Case(folded), r"first \(shape \[4, 8, 8\], strides \[0, 8, 1\]\) has several elements in one place.*clone"),
        (
            Case(laid_out(with_gaps), optimizer=torch_adamw(fused=True)),
            r"first has gaps in its memory .*AdamW\(fused=True\) would write into them.*use FusedAdamW",
        ),
        (
            Case(Toy, optimizer=lambda model: torch.optim.LBFGS(model.parameters())),
            r"LBFGS\.step wants closure.*FusedAdamW.*standard_no_expert_clip",
        ),
        (Case(ListOfExperts), r"keeps its experts as a list of modules: experts \(8 modules\).*experts=<regex"),
        (Case(lambda: frozen().requires_grad_(False), optimizer=lambda m: FusedAdamW(m.parameters())), "LoRA"),
        (Case(Toy, optimizer=lambda m: FusedAdamW([m.second])), "first .*optimizer does not hold it.*freeze it"),
    ],
)
def test_what_cannot_work_is_refused_before_training(case, message):
    with pytest.raises(ValueError, match=message):
        released(case)


@pytest.mark.parametrize("case", [Case(tied_by_data), Case(folded)])
def test_modes_without_hooks_leave_odd_memory_to_torch(case):
    released(case, "standard")


def test_torchs_fused_kernel_writes_into_the_gaps_of_a_parameter():
    memory = torch.zeros(4, 8, 8, 2)
    parameter = nn.Parameter(memory[..., 0])
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=0.1, fused=True).step()
    assert memory[..., 1].any()


def read_detached(model):
    x = model.all_experts(model.dense(inputs()), model.second.detach()).tanh()
    return model.all_experts(x, model.second).square().mean()


def test_a_weight_that_the_graph_still_needs_is_explained_and_a_clone_helps():
    model, _, handle = released(Case(Toy))
    with pytest.raises(RuntimeError, match=r"still needs the weight.*detach\(\)\.clone\(\).*modified by an inplace"):
        handle.train_step(read_detached(model))


def test_views_of_one_buffer_are_explained():
    model = Toy()
    memory = torch.randn(8, 8, 8)
    model.first, model.second = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    _, _, handle = released(Case(lambda: model))
    with pytest.raises(RuntimeError, match=r"views of one buffer: give each its own memory"):
        handle.train_step(model(inputs()))


def test_a_model_cast_to_float16_while_hooks_are_on_is_refused():
    model, optimizer, handle = released(Case(Toy, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)))
    model.half()
    with pytest.raises(ValueError, match=r"second is float16.*bf16-true"):
        handle.train_step(model(inputs().half()).float())
    assert optimizer.param_groups


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "in_backward_all"])
def test_after_an_exception_in_backward_the_next_one_says_what_to_call(mode):
    model, optimizer, handle = released(Case(Toy), mode)
    spoil = model.first.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        handle.backward(model(inputs()))
    spoil.remove()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"second got a second gradient.*call handle\.abandon_step\(\)"):
        handle.backward(model(inputs()))
    handle.abandon_step()
    for step in range(2):
        handle.train_step(model(inputs(step)))
    assert optimizer.state[model.first]["step"] == 2
    assert optimizer.state[model.second]["step"] == 3  # what was updated in the broken step stays updated


# Checkpointing and the router's loss.


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpointing_is_refused_only_where_it_loses_the_routers_loss(asked, reentrant):
    model = small_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.config.output_router_logits = asked
    trainer = make_trainer(SonarMoEStrategy(), 1)
    module = AutomaticLM(model, fused())
    if asked and reentrant:
        batch = batches(1)[0]
        lost = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).aux_loss
        assert not lost.requires_grad, "if it has a gradient, there is nothing to refuse"
        with pytest.raises(ValueError, match=r"router's auxiliary loss.*\{'use_reentrant': False\}"):
            trainer.fit(module, loader(batches(1)))
    else:
        trainer.fit(module, loader(batches(1)))
        assert trainer.global_step == 1
