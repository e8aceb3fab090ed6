"""Several devices that each hold a shard of the model."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_sonar.modes import mode_name
from lightning_sonar.strategies.checkpoints import OLD, PARTIAL, holds_code, make_newest, recover_folder
from lightning_sonar.strategies.children import end_children
from lightning_sonar.strategies.groups import OwnGroup
from lightning_sonar.strategies.intact import CheckpointError, damage_of
from lightning_sonar.strategies.mixin import SonarMoEStrategyMixin
from lightning_sonar.strategies.sharding import (
    FreedCheck,
    GatheredLeaves,
    HeldUntilUsed,
    expert_modules,
    has_sharded_parameters,
    shard_units_,
)
from lightning_sonar.strategies.untrusted import check_plain

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# FSDP2 hangs on a module's forward, which these do not have.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_UNSHARDABLE = (
    "{module} holds a {kind} directly, which SonarMoEFSDPStrategy cannot shard on its own. Put the model into one "
    "submodule with a forward, or shard it in configure_model with shard_moe_."
)


class _WithCheckpointIO(ModelParallelStrategy):
    """Lightning's strategy takes no ``checkpoint_io``, though it writes whole checkpoints through one."""

    def __init__(self, *args: Any, checkpoint_io: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoint_io = checkpoint_io


class SonarMoEFSDPStrategy(SonarMoEStrategyMixin, _WithCheckpointIO):
    """Updates expert tensors inside backward, on several devices that each hold a shard of the model (FSDP2)::

        trainer = L.Trainer(strategy=SonarMoEFSDPStrategy(), devices=2, gradient_clip_val=1.0, precision="bf16-true")

    A module that does not shard itself in ``configure_model`` is sharded by `shard_moe_`. FSDP2 runs the hooks on the
    sharded gradient, right after it has been reduced, and each rank updates its own shard. In the first step it is
    checked that the memory of these gradients is freed. Every rank has to build the same model: seed before building.

    Args:
        mp_policy: FSDP2's mixed precision; None keeps the parameters' dtype.
        reshard_after_forward: see `shard_moe_`.
        data_parallel_size: ranks over which data and model are sharded; ``"auto"`` is all there are.
        tensor_parallel_size: ranks that work on one batch together, for a module that shards itself.
        save_distributed_checkpoint: True: a checkpoint is a folder into which each rank writes its shard. False: one
            file, put together on rank 0, which any strategy reads. Either resumes on another number of ranks.
        timeout: how long a rank waits for another before it gives up, at the start too, when the ranks meet.

    The other arguments are those of `SonarMoEStrategyMixin` and Lightning's ``ModelParallelStrategy``.

    Raises:
        RuntimeError: in the first step, if gradients that were used inside backward are not freed.
        ValueError: for a mode with one hook an expert, since a shard holds some of the experts only.
    """

    strategy_name = "sonar_moe_fsdp"

    def __init__(
        self,
        *args: Any,
        mp_policy: MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.mode.granularity == "expert":
            raise ValueError(
                f"mode {mode_name(self.mode)!r} has one hook an expert, but FSDP2 shards expert tensors along the "
                "experts, so a rank holds some of them only. Use mode='sonar': the updates are the same."
            )
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self._ranks: OwnGroup | None = None
        self._leaves: GatheredLeaves | None = None

    def setup_environment(self) -> None:
        if self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = 1
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes // self._tensor_parallel_size
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if not has_sharded_parameters(module):
            self._shard(module)
        if is_overridden("configure_model", module):
            super().setup(trainer)
            return
        # Lightning's strategy insists on this method, for there it is the user who shards.
        module.configure_model = _nothing_left_to_do  # type: ignore[method-assign]
        try:
            super().setup(trainer)
        finally:
            del module.configure_model

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        handle, module = self.in_backward, self.lightning_module
        assert handle is not None
        assert module is not None
        self._ranks = OwnGroup(self._timeout)
        handle.agree_by(self._ranks.agree)
        if self.mode.expert_clip == "exact":
            self._leaves = GatheredLeaves(module.modules(), handle.experts.values())
            handle.leaf_of = self._leaves.leaf_of
        if self.mode.in_backward != "none":
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            handle.observers += [HeldUntilUsed(), FreedCheck(names)]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # A folder cannot be replaced in one go, but it can be complete before it gets its name.
        partial, old = (path.with_name(path.name + ending) for ending in (PARTIAL, OLD))
        if self.is_global_zero:
            recover_folder(path)  # else the only complete one would be removed below
            shutil.rmtree(partial, ignore_errors=True)
        self.barrier()
        super().save_checkpoint(checkpoint, partial, storage_options)
        self.barrier()
        if self.is_global_zero and partial.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            if path.is_file():
                path.unlink()
            elif path.is_dir():
                path.rename(old)
            partial.rename(path)
            make_newest(path)
            shutil.rmtree(old, ignore_errors=True)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        damage = None
        if self.is_global_zero:
            recover_folder(path)
            damage = damage_of(path)  # read by one rank for all
        damage = self.broadcast(damage)
        if damage is not None:
            raise CheckpointError(damage)
        try:
            if weights_only is not False and path.is_dir():  # torch's own reader does not look
                check_plain(path)
            checkpoint = super().load_checkpoint(path, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            raise holds_code(path, error) from error
        if self.in_backward is not None:  # Lightning loads into a model that is sharded and set up
            self.in_backward.load_state_dict(self._resumed)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        end_children(self.launcher)

    def teardown(self) -> None:
        super().teardown()
        if self._leaves is not None:
            self._leaves.remove()
        self._leaves = None
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None

    def _shard(self, module: LightningModule) -> None:
        own = [name for name, parameter in module.named_parameters(recurse=False)]
        if own:
            raise ValueError(
                f"{type(module).__name__} itself holds the parameter {own[0]}. Lightning calls training_step, not "
                "forward, so FSDP2 could not gather it. Put it into a submodule."
            )
        # Before sharding, since a shard in another dtype than its unit's buffers is refused.
        self.precision_plugin.convert_module(module)
        units = expert_modules(module, self._find_experts(module).names)
        mesh = self.device_mesh["data_parallel"]
        for child in module.children():
            if next(child.parameters(), None) is None:
                continue
            if isinstance(child, _CONTAINERS) or child in units:
                raise ValueError(_UNSHARDABLE.format(kind=type(child).__name__, module=type(module).__name__))
            shard_units_(child, units, mesh, self.mp_policy, self.reshard_after_forward)


def _nothing_left_to_do() -> None:
    """Stands for a module's ``configure_model`` while Lightning looks for one."""
