"""Records a loop: its training forwards, its clipping, and the gradients and weights just before each step.

Nothing is communicated while the loop runs, but where DeepSpeed holds gradients or weights in parts: gathering them is
a collective, which its own step is too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from distaccum.engines.modules import clean, is_sharded
from distaccum.errors import MisuseError
from distaccum.tools.audit.batches import BatchPool
from distaccum.tools.audit.dropout import switch_off
from distaccum.tools.audit.records import Clip, MicroBatch, Window, tensors_of

# What wraps a model: modules of these packages, which hold it as ``module`` or as their only child.
_WRAPPERS = (
    "torch.nn.parallel.",
    "deepspeed.",
    "lightning.fabric.",
    "lightning_fabric.",
    "lightning.pytorch.overrides",
    "distaccum.engines.",
)
_SHARDS_FLAT = "torch.distributed.fsdp.fully_sharded_data_parallel"


class Watch:
    """Hooks into a loop between :meth:`open` and :meth:`close`.

    Args:
        model: bare or wrapped; None: the first module outside of any other that computes with gradients.
        optimizer: whose step ends a window; None: any over the model's parameters.
        batches: a rank's micro-batches; None: see :class:`~distaccum.tools.audit.batches.BatchPool`.
        windows: how many to keep from the first on; the last one is kept too.
        on_enough: called when so many windows have been recorded, before the optimizer steps.
        before_shutdown: called before the process group is destroyed.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Any,
        batches: Iterable[Any] | None,
        *,
        windows: int,
        on_enough: Callable[[], None] | None,
        before_shutdown: Callable[[], None],
    ) -> None:
        self.model: nn.Module | None = None
        self.windows: list[Window] = []
        self.without_dropout: list[str] = []
        self.training: dict[str, bool] = {}
        self.pool = BatchPool(batches)
        self._given = model
        groups = [] if optimizer is None else optimizer.param_groups
        self._stepped = {id(parameter) for group in groups for parameter in group["params"]}
        self._keep = windows
        self._on_enough = on_enough
        self._before_shutdown = before_shutdown
        self._opened = ExitStack()
        self._pending: list[MicroBatch] = []
        self._clips: list[Clip] = []
        self._backwards = 0
        self._steps = 0
        self._low_precision = False
        self._loss_scale: float | None = None
        self._replicated: Any = None  # DistributedDataParallel around the model
        self._engine: Any = None  # DeepSpeed's, which steps by itself
        self._depth = 0

    def open(self) -> None:
        """Begins to record.

        Raises:
            MisuseError: the model is wrapped in what hides its parameters.
        """
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # Compiled code does not call hooks that were added after compilation.
        self._opened.enter_context(torch.compiler.set_stance("force_eager"))
        self._opened.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._replace(DataLoader, "__iter__", lambda original: lambda loader: self.pool.watch(original(loader)))
        self._replace(torch.amp.GradScaler, "scale", self._noting_scale)
        self._replace(torch.amp.GradScaler, "step", self._noting_skip)
        self._replace(torch.nn.utils, "clip_grad_norm_", self._noting_clip)
        if dist.is_available():
            self._replace(dist, "destroy_process_group", self._shutting_down)
        if self._given is None:
            self._restore_call = self._replace(nn.Module, "__call__", self._looking_for_the_model)
        else:
            self._attach(self._given)

    def close(self) -> None:
        """Leaves the loop as it was found."""
        self._opened.close()

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        original = getattr(owner, name)

        def restore() -> None:
            setattr(owner, name, original)

        setattr(owner, name, wrap(original))
        self._opened.callback(restore)
        return restore

    # ------------------------------------------------------------------------------------------ the model

    def _looking_for_the_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outermost, self._depth = self._depth == 0, self._depth + 1
            try:
                trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
                if outermost and trains and self.model is None:
                    self._restore_call()
                    self._attach(module)
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _attach(self, outer: nn.Module) -> None:
        model = outer
        while True:
            # Of the class itself: models derive from what lives beside wrappers, as LightningModule does.
            home = f"{type(model).__module__}."
            inner = getattr(model, "_orig_mod", None)
            if home.startswith(_SHARDS_FLAT):
                raise MisuseError(
                    "the model is in FullyShardedDataParallel, whose flat parameters have lost their names: "
                    "audit the loop under DistributedDataParallel, or shard with fully_shard (FSDP2)"
                )
            if inner is None and (home.startswith(_WRAPPERS) or isinstance(model, nn.parallel.DistributedDataParallel)):
                inner = getattr(model, "module", next(model.children(), None))
            if isinstance(model, nn.parallel.DistributedDataParallel):
                self._replicated = model
            if hasattr(model, "is_gradient_accumulation_boundary"):
                self._engine = model
                self._replace(model, "step", self._before_engine_step)
            if not isinstance(inner, nn.Module):
                break
            model = inner
        self.model = model
        self.training = {name: module.training for name, module in model.named_modules()}
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._opened.callback(module.register_forward_hook(self._noting_precision).remove)
        self.without_dropout, restore = switch_off(model)
        self._opened.callback(restore)
        self._opened.callback(model.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        self._opened.callback(model.register_forward_hook(self._after_forward).remove)

    # ------------------------------------------------------------------------------------------ micro-batches

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or _is_a_look():
            return
        if not self._pending:
            self.training = {name: part.training for name, part in module.named_modules()}
        batch, source, key = self.pool.choose(module, args, kwargs)
        last = self._pending[-1] if self._pending else None
        if last is not None and key is not None and last.key is key and not last.used:
            return  # another forward on the same batch, before its backward: two towers, or two views
        reduces = None if self._replicated is None else bool(self._replicated.require_backward_grad_sync)
        self._pending.append(MicroBatch(batch, source, reduces=reduces, key=key))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or not self._pending or _is_a_look():
            return
        micro = self._pending[-1]
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        micro.used = not outputs  # an output of unknown kind: taken for used
        for tensor in outputs:
            tensor.register_hook(partial(self._used, micro))  # type: ignore[no-untyped-call]

    def _noting_precision(self, module: nn.Module, args: Any, output: Any) -> None:
        """Layers compute in few bits where autocast is on inside of the model, or sharding casts."""
        kinds = (torch.float16, torch.bfloat16)
        self._low_precision = self._low_precision or any(tensor.dtype in kinds for tensor in tensors_of(output))

    def _used(self, micro: MicroBatch, gradient: Tensor | None) -> None:
        """Notes that a gradient came back; that of a forward "for nothing" is zero everywhere, or None."""
        if gradient is not None and not micro.used and bool(gradient.any()):  # host read: an audit is no training
            micro.used = True
            self._backwards += 1
            self.pool.forget()

    # ------------------------------------------------------------------------------------------ scale and clipping

    def _noting_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler.is_enabled():
                self._loss_scale = float(scaler.get_scale())
            return scaled

        return scale

    def _noting_skip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps
            result = original(scaler, optimizer, *args, **kwargs)
            if self._steps == before and self._covered(optimizer):
                self._begin_window()  # skipped for an overflow: no window
            return result

        return step

    def _noting_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            clipped = parameters if isinstance(parameters, Tensor) else list(parameters)
            norm = original(clipped, max_norm, *args, **kwargs)
            of_the_model = {id(p) for p in self.model.parameters()} if self.model is not None else set()
            if any(id(p) in of_the_model for p in ([clipped] if isinstance(clipped, Tensor) else clipped)):
                whole = norm.full_tensor() if is_sharded(norm) else norm
                self._clips.append(Clip(self._backwards, float(max_norm), float(whole)))
            return norm

        return clip_grad_norm_

    def _shutting_down(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            failing = sys.exc_info()[1]  # a clean-up after an error: the other ranks may be gone
            if failing is None or isinstance(failing, SystemExit):
                self._before_shutdown()
            return original(*args, **kwargs)

        return destroy_process_group

    # ------------------------------------------------------------------------------------------ the step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook on every optimizer's step. A closure computes the gradient within the step: it is looked at after."""
        given = [value for value in (*args[1:], kwargs.get("closure")) if callable(value)]
        if not given:
            self._look_at_gradients(optimizer)
            return None
        looked = False

        def closure() -> Any:
            nonlocal looked
            result = given[0]()
            if looked:
                self._begin_window()  # LBFGS calls it again, at other weights
            else:
                looked = True
                self._look_at_gradients(optimizer)
            return result

        return (args[0], closure), {key: value for key, value in kwargs.items() if key != "closure"}

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        if self._engine is not None or self.model is None:
            return
        found = self._covered(optimizer)
        if not found:
            return
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which unscales by itself
        gradients = {name: _kept(p.grad, scale) for name, p in found.items()}
        used = [micro for micro in self._pending if micro.used]
        last = self.windows[-1] if self.windows else None
        if not used and last is not None and id(optimizer) not in last.optimizers:
            last.optimizers.add(id(optimizer))  # one of several optimizers that step together
            last.gradients |= gradients
            return
        self._record(used, gradients, {id(optimizer)})

    def _covered(self, optimizer: Any) -> dict[str, nn.Parameter]:
        """The model's parameters that a step of ``optimizer`` changes, but for those of optimizers not asked about."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        wanted = held & self._stepped if self._stepped else held
        named = [] if self.model is None else list(self.model.named_parameters())
        return {
            clean(name): parameter for name, parameter in named if parameter.requires_grad and id(parameter) in wanted
        }

    def _before_engine_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self.model is not None and self._engine.is_gradient_accumulation_boundary():
                from_parts = sys.modules["deepspeed.utils"].safe_get_full_grad
                trained = {clean(n): p for n, p in self.model.named_parameters() if p.requires_grad}
                gradients = {name: _kept(from_parts(p), None) for name, p in trained.items()}
                self._record([micro for micro in self._pending if micro.used], gradients, set())
            return original(*args, **kwargs)

        return step

    def _record(self, used: list[MicroBatch], gradients: dict[str, Tensor | None], optimizers: set[int]) -> None:
        assert self.model is not None
        if len(self.windows) > self._keep:
            self.windows.pop()  # it was not the last
        self._low_precision |= any(
            g is not None and g.dtype in (torch.float16, torch.bfloat16) for g in gradients.values()
        )
        self.windows.append(
            Window(
                index=self._steps,
                micro_batches=used,
                clips=self._clips,
                gradients=gradients,
                weights={clean(name): _weight(p) for name, p in self.model.named_parameters()},
                optimizers=optimizers,
                loss_scale=self._loss_scale,
                low_precision=self._low_precision,
            )
        )
        self._steps += 1
        self._begin_window()
        if self._steps == self._keep and self._on_enough is not None:
            self._on_enough()

    def _begin_window(self) -> None:
        self._pending, self._clips, self._backwards, self._loss_scale = [], [], 0, None


def _is_a_look() -> bool:
    """Whether a forward is a proof's own look at some samples, on which nothing trains."""
    parts = sys.modules.get("distaccum.verification.parts")
    return parts is not None and bool(parts.LOOKS.get())


def _kept(gradient: Any, scale: Any) -> Tensor | None:
    if gradient is None:
        return None
    found: Tensor = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()
    found = found if scale is None else found / scale
    return found if is_sharded(found) else found.cpu()


def _weight(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_id"):  # DeepSpeed's ZeRO 3 holds a part; gathering is a collective
        return _kept(sys.modules["deepspeed.utils"].safe_get_full_fp32_param(parameter), None)  # type: ignore[return-value]
    return _kept(parameter, None)  # type: ignore[return-value]
