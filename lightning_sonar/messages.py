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


def late_clip(algorithm: str, asked: float, used: float | None, updated: int) -> str:
    """A clip asked for after backward is another one than the hooks have applied."""
    what = "unclipped gradients" if not used else f"the {algorithm} {used}"
    say = "Trainer(gradient_clip_val=...)" if algorithm == "norm" else (
        "Trainer(gradient_clip_val=..., gradient_clip_algorithm='value')"
    )  # fmt: skip
    attribute = "max_norm" if algorithm == "norm" else "clip_value"
    return (
        f"Clipping by {algorithm} {asked} was asked for after backward, but {updated} tensors were updated "
        f"in it with {what}. Say it before: {say}, or handle.{attribute} = ... in a plain loop."
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
        "this step is not whole. The graph holds other tensors than these parameters: set handle.leaf_of so that it "
        "returns those, or use expert_clip='lagged'."
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
        "Larger microbatches with activation checkpointing keep it."
        if exact_clip
        else "accumulation='per_microbatch' updates experts once a microbatch instead, which saves the memory and "
        "changes the training."
    )
    return (
        "Gradients are accumulated over several backwards, so they stay alive between them and the memory that "
        f"mode {mode!r} saves is lost; the updates are exact. {remedy}"
    )
