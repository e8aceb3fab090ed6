"""What the step inside backward says when it is used in a way that cannot work: texts, each with its remedy."""

from __future__ import annotations


def second_gradient(name: str) -> str:
    """A tensor's gradient came again before its step had ended."""
    return (
        f"{name} got a second gradient before the step that its first one belongs to had ended; it "
        "was already updated, so this gradient would be applied as a step of its own. If you accumulate over "
        "several backwards, put all but the last into `with handle.accumulate():` (in a SonarMoEMixin module "
        "`with self.accumulate():`), or choose accumulation='per_microbatch'. If you do not, call "
        "optimizer.step() after each backward. If the tensor is used twice under reentrant activation "
        "checkpointing, use checkpoint(..., use_reentrant=False). If an exception broke the last step off, call "
        "handle.abandon_step(). If nothing of this fits, "
        "mode='standard_no_expert_clip' does without hooks."
    )


def create_graph(name: str) -> str:
    """A gradient that has a graph of its own."""
    return (
        f"backward(create_graph=True) reached {name}, which is updated inside backward: the "
        "graph of its gradient would be computed with a weight that has changed. Use torch.autograd.grad "
        "for the inner gradient, or mode='standard_no_expert_clip'."
    )


def float16(name: str) -> str:
    """A tensor that is updated inside backward has a dtype that needs loss scaling."""
    return (
        f"{name} is float16. Its gradients need loss scaling, and a step inside backward cannot be undone when the "
        "scale proves too large. Use bfloat16 (precision='bf16-true' or 'bf16-mixed') or float32."
    )


def released_already(name: str) -> str:
    """Two handles want one tensor."""
    return f"{name} is already updated inside backward by another handle; call that handle's remove() first."


def later_hook(name: str) -> str:
    """Somebody's hook comes after ours."""
    return (
        f"A post-accumulate-grad hook was put on {name} after it was released, so it would find the gradient gone. "
        "handle.backward(loss) and handle.train_step(loss) see to it that hooks of others come first: call one of them "
        "instead of loss.backward(), or register the hook before release_in_backward."
    )


def late_clip(algorithm: str, asked: float, used: float | None, updated: int) -> str:
    """A clip asked for after backward is another one than the hooks have applied."""
    what = "unclipped gradients" if not used else f"the {algorithm} {used}"
    more, attribute = ("", "max_norm") if algorithm == "norm" else (", gradient_clip_algorithm='value'", "clip_value")
    return (
        f"Clipping by {algorithm} {asked} was asked for after backward, but {updated} tensors were updated "
        f"in it with {what}. Say it before: Trainer(gradient_clip_val=...{more}), or handle.{attribute} = ... in a "
        "plain loop."
    )


def no_max_norm(expert_clip: str) -> str:
    """Nobody has said what to clip to."""
    return (
        f"expert_clip={expert_clip!r} clips inside backward, so it has to know the largest norm before: pass max_norm "
        "to handle.train_step, or set handle.max_norm (0 clips nothing) before backward and call handle.clip_ after it."
    )


def bare_backward(needs: str) -> str:
    """``loss.backward()`` was called where the handle has to run it."""
    return f"{needs}: call handle.backward(loss) or handle.train_step(loss) instead of loss.backward()."


def missing_in_second_pass(missing: list[str], updated: int) -> str:
    """Some tensors had a gradient in the first of two passes and none in the second."""
    return (
        f"expert_clip='exact': the first backward pass reached {updated + len(missing)} expert tensors, the second one "
        f"{updated}; missing: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Their update is lost, so "
        "this step is not whole. Either they lie under reentrant activation checkpointing, which hides them from the "
        "graph: use checkpoint(..., use_reentrant=False); or the graph holds other tensors than these parameters: set "
        "handle.leaf_of so that it returns those. expert_clip='lagged' needs neither."
    )


def not_repeatable(shape: tuple[int, ...], first: float, again: float) -> str:
    """A backward through the same graph gave another gradient the second time."""
    return (
        f"expert_clip='exact' runs backward twice, and the gradient of a tensor of shape {list(shape)} had the norm "
        f"{first:.4g} in the first pass and {again:.4g} in the second: a backward of this model overwrites what it "
        "saved (some fused kernels do, to save memory), or draws random numbers. Updates would be wrong, so this one "
        "was not made. Turn that kernel off, or use expert_clip='lagged', 'per_tensor' or 'per_expert'."
    )


def after_updates(updated: int) -> str:
    """A further backward in a step whose experts have been updated by the norm of an earlier one."""
    return (
        f"expert_clip='exact': {updated} tensors were updated by an earlier backward of this step, by its own norm, so "
        "the norm of the whole step can no longer be measured. Put all backwards but the step's last one into `with "
        "handle.accumulate():` (in a SonarMoEMixin module `with self.accumulate():`), or add up the losses and run one "
        "backward."
    )


def why_not_twice(error: str) -> str | None:
    """What an error of torch's means that comes from running backward twice; None if it is another one."""
    if "donated" in error:
        return (
            "expert_clip='exact' runs backward twice, and torch.compile has let backward reuse the memory of what "
            "forward saved. Set torch._functorch.config.donated_buffer = False before compiling, and clear compile "
            "caches that were written without it (torch takes old code from them: "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1), or use expert_clip='lagged'."
        )
    if "second time" in error:
        return (
            "expert_clip='exact' runs backward twice, and the first pass did not keep the graph: a backward of your "
            "own has to hand on what it is given, `loss.backward(**kwargs)` with retain_graph=True in it. Or use "
            "expert_clip='lagged'."
        )
    if "use_reentrant" in error:
        return (
            "expert_clip='exact' runs its second backward for the expert tensors only, which reentrant activation "
            "checkpointing cannot do; nothing was updated. Use checkpoint(..., use_reentrant=False) "
            "(gradient_checkpointing_enable({'use_reentrant': False}) in transformers), or expert_clip='lagged'."
        )
    return None


def why_changed(error: str) -> str | None:
    """What an error of torch's means that comes from a weight that was updated too early; None if it is another one."""
    if "modified by an inplace operation" not in error:
        return None
    return (
        "A tensor was updated inside backward, and the graph still needs the weight that it had. Either the graph also "
        "uses the weight without asking for its gradient (weight.detach(), in a penalty for example): use "
        "weight.detach().clone() there. Or this backward follows another one through the same graph "
        "(retain_graph=True): put all but the last into `with handle.accumulate():`. Or several parameters are views "
        "of one buffer: give each its own memory (.clone()). If nothing of this fits, mode='standard_no_expert_clip' "
        f"does without hooks; call handle.abandon_step() before you go on. torch says: {error}"
    )


LAGGED_WITHOUT_CLIP = (
    "The optimizer stepped, but nobody called handle.clip_ after backward: expert_clip='lagged' takes the norm of the "
    "step there, and without it nothing is ever clipped. Call handle.clip_(max_norm) before optimizer.step(); under "
    "Lightning, a configure_gradient_clipping of your own has to call self.clip_gradients."
)

BARE_BACKWARD = (
    "loss.backward() was called directly, so nothing looked whether the loss is finite before tensors were "
    "updated. Call handle.backward(loss) or handle.train_step(loss), or choose on_nonfinite='ignore'."
)

DENSE_LEFT_UNCLIPPED = (
    "The optimizer stepped, but nobody called handle.clip_ after backward: expert tensors were clipped by the global "
    "norm, and the others were not. Call handle.clip_(max_norm) before optimizer.step(); under Lightning, a "
    "configure_gradient_clipping of your own has to call self.clip_gradients."
)


def saving_lost(mode: str, exact_clip: bool) -> str:
    """Gradients are accumulated exactly."""
    remedy = (
        "Larger microbatches with activation checkpointing keep it, and so does accumulation='host'."
        if exact_clip
        else "accumulation='host' sums them in host memory, which keeps the saving and the training and costs time; "
        "accumulation='per_microbatch' updates experts once a microbatch, which keeps the saving and changes the "
        "training."
    )
    return (
        "Gradients are accumulated over several backwards, so they stay alive between them and the memory that "
        f"mode {mode!r} saves is lost; the updates are exact. {remedy}"
    )
