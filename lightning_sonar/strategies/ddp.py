"""Several devices, each with a whole copy of the model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lightning_sonar.strategies.averaging import RankAverage
from lightning_sonar.strategies.children import end_children
from lightning_sonar.strategies.groups import OwnGroup
from lightning_sonar.strategies.mixin import SonarMoEStrategyMixin

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_IGNORED = "_ddp_params_and_buffers_to_ignore"


class SonarMoEDDPStrategy(SonarMoEStrategyMixin, DDPStrategy):
    """Updates expert tensors inside backward, on several devices that each hold the whole model::

        trainer = L.Trainer(strategy=SonarMoEDDPStrategy(), devices=2, gradient_clip_val=1.0, precision="bf16-true")

    DDP averages gradients in buckets, and a hook that updates a parameter before its bucket is averaged makes the
    ranks diverge without an error. So the tensors that are updated inside backward are hidden from DDP, broadcast
    once from rank 0, and averaged in their hooks over a process group of their own; they take no room in buckets.
    Modes that update nothing inside backward are plain DDP.

    The arguments are those of `SonarMoEStrategyMixin` and of Lightning's ``DDPStrategy``. ``timeout`` is how long a
    rank waits for another before it gives up, at the start too, when the ranks meet. ``find_unused_parameters=True``
    lets expert tensors, too, be unused on some ranks.

    Raises:
        RuntimeError: in training, if an expert tensor gets no gradient on some rank and ``find_unused_parameters`` is
            off.
    """

    strategy_name = "sonar_moe_ddp"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._average: RankAverage | None = None
        self._ranks: OwnGroup | None = None
        self._hidden: list[Any] = []
        self._ignored_before: Any = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Names are given by `lightning_sonar.register_strategies`."""

    def configure_ddp(self) -> None:
        """Hide what is updated inside backward from DDP, and wrap the rest."""
        module = self.lightning_module
        assert module is not None
        self._ranks = OwnGroup(self._timeout)
        hidden = self._updated_inside(module)
        self._average = RankAverage(hidden, self._ranks, bool(self._ddp_kwargs.get("find_unused_parameters")))
        if not hidden:
            super().configure_ddp()
            return
        ids = {id(tensor) for tensor in hidden.values()}
        names = [name for name, tensor in module.named_parameters(remove_duplicate=False) if id(tensor) in ids]
        self._ignored_before = getattr(module, _IGNORED, None)
        self._hidden = [tensor for tensor in hidden.values() if not hasattr(tensor, "_ddp_ignored")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, [*(self._ignored_before or ()), *names]
        )
        # DDP refuses a module that has nothing for it to do.
        nothing_left = all(id(tensor) in ids for tensor in module.parameters() if tensor.requires_grad)
        for tensor in [*module.parameters(), *module.buffers()] if nothing_left else hidden.values():
            self._ranks.broadcast(tensor)
        if not nothing_left:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        handle = self.in_backward
        assert handle is not None
        assert self._ranks is not None
        if self.mode.in_backward != "none":
            handle.ranks = self._average
        handle.agree_by(self._ranks.agree)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        handle, model = self.in_backward, self.lightning_module
        if handle is None or model is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if handle.ranks is not None and closure_loss.requires_grad:
            # Inside backward, and before DDP's own last callback: that one waits for the other ranks' buckets, and
            # they may be waiting for our averages.
            closure_loss.register_hook(lambda _: Variable._execution_engine.queue_callback(handle.finish_backward))
        # By hand there is no fit loop that tells DDP which backward only adds up.
        adds_up = not model.automatic_optimization and handle.accumulating
        quiet = self.model.no_sync() if adds_up and isinstance(self.model, DistributedDataParallel) else nullcontext()
        with quiet:
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        end_children(self.launcher)

    def teardown(self) -> None:
        super().teardown()
        module = self.lightning_module
        if module is not None and self._hidden:
            if self._ignored_before is None:
                vars(module).pop(_IGNORED, None)
            else:
                setattr(module, _IGNORED, self._ignored_before)
            for tensor in self._hidden:
                vars(tensor).pop("_ddp_ignored", None)
        if self._ranks is not None:
            self._ranks.close()
        self._ranks, self._average = None, None
        self._hidden, self._ignored_before = [], None

    def _updated_inside(self, module: LightningModule) -> dict[str, Tensor]:
        """The tensors that hooks will update, by name."""
        if self.mode.in_backward == "none":
            return {}
        experts = {id(tensor) for tensor in self._find_experts(module).values()}
        return {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and self.mode.steps_in_backward(id(parameter) in experts)
        }
