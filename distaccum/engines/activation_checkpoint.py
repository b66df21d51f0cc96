"""Activation checkpoints: the backward computes a block again, of which the forward has kept less.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); torch's selective activation checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distaccum.engines.compiled import BesideCompiled
from distaccum.errors import MisuseError

# What a selective checkpoint keeps: what takes long to compute and little memory to hold. Attention is an operator for
# each kernel: flash, memory-efficient, cuDNN's, or one of a back end from elsewhere; without one it is matrix products.
_LONG = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_fused_attention_overrideable",
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
)
_PACKETS = [getattr(torch.ops.aten, name) for name in _LONG if hasattr(torch.ops.aten, name)]  # torch 2.8 lacks some
_FORMS = [getattr(packet, form) for packet in _PACKETS for form in packet.overloads()]
_KEPT = frozenset(form for form in _FORMS if not form._schema.is_mutable)
# Their results are other tensors over the same memory, whose changes torch counts apart.
_ALIASES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_unsafe_view", "_reshape_alias")
    if hasattr(torch.ops.aten, name)
)
_REMEDY = (
    "Write it out of place (y = y * 2 for y.mul_(2), F.relu(y) for F.relu_(y)), or use "
    "engine.activation_checkpoint=blocks, which keeps none"
)


class Checkpoints:
    """Has each block of a model that is not wrapped yet be computed again in the backward, until :meth:`undo`.

    Args:
        model: Hugging Face's cache of keys and values, which would be kept twice, is switched off.
        blocks: of the model.
        selective: whether the results of matrix products and attention are kept.
        compiled: whether ``torch.compile`` traces the blocks: it keeps writes in place from what is computed twice.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], *, selective: bool, compiled: bool) -> None:
        self.selective = selective
        """Whether a backward can be run once only, as torch gives what is kept away."""
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
        names = {module: name for name, module in model.named_modules()}
        self._before: list[tuple[nn.Module, Any]] = []
        for block in blocks:
            options: dict[str, Any] = {"use_reentrant": False}
            if selective and compiled:
                options["context_fn"] = partial(create_selective_checkpoint_contexts, _keeps)
            elif selective:
                options["context_fn"] = partial(_contexts, names.get(block) or type(block).__name__)
            run = partial(checkpoint, block.forward, **options)
            self._before.append((block, vars(block).get("forward")))
            # The innermost: what an engine puts around a block, such as FSDP2's hooks, goes around it.
            block.forward = run if compiled else Recomputed(block, names.get(block, ""), run)

    def undo(self) -> None:
        """Gives each block its own forward back."""
        for block, forward in reversed(self._before):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                block.forward = forward
        self._before = []


class Recomputed:
    """A block's forward, and a refusal where it changes a buffer: computed again, it would change it twice.

    Args:
        block: whose buffers they are.
        name: in the model.
        run: its forward, checkpointed.
    """

    def __init__(self, block: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self._block, self._name, self._run = block, name, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it; raises MisuseError before a backward."""
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        before = {name: (buffer, buffer._version) for name, buffer in self._block.named_buffers()}
        found = self._run(*args, **kwargs)
        for name, (buffer, version) in before.items():
            if buffer._version != version:
                place = f"{self._name}.{name}" if self._name else name
                problem = f"the forward of {type(self._block).__name__} changes the buffer {place}, as BatchNorm does"
                remedy = "engine.blocks=[...] names blocks that change none, or engine.activation_checkpoint=none"
                raise MisuseError(f"{problem}, and an activation checkpoint would change it twice: {remedy}")
        return found


class _Watch(BesideCompiled):
    """Notes what a selective checkpoint keeps of a block's forward, and whether something is written into it.

    torch looks at changes of the kept tensors itself, by a count that other tensors over the same memory do not share:
    a matrix product of more than two dimensions gives such a one, and ``.data`` does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = set[int]()
        self._kept: list[tuple[Tensor, str]] = []  # and by which operator
        self._versions: list[int] = []
        self._written = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.is_mutable and any(map(self._is_kept, _written_by(function, args, kwargs or {}))):
            self._written = self._written or str(function)
        found = function(*args, **(kwargs or {}))
        if function in _KEPT:
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    self._places.add(tensor.untyped_storage()._cdata)
                    self._note(tensor, function)
        elif function in _ALIASES and self._is_kept(args[0]):
            self._note(found, function)
        return found

    def _is_kept(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._places

    def _note(self, tensor: Tensor, function: Any) -> None:
        # An alias that shares the count of changes; the tensor itself would hold its graph.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._kept.append((tensor.detach(), str(function)))

    def __exit__(self, *error: Any) -> None:
        """The forward has ended; from here on only counts tell what is written."""
        super().__exit__(*error)
        self._versions = [tensor._version for tensor, _ in self._kept]

    @property
    def written(self) -> str:
        """The operator that has written into what is kept, or the one whose result was written into; else empty."""
        changed = (
            by for (tensor, by), version in zip(self._kept, self._versions, strict=True) if tensor._version != version
        )
        return self._written or next(changed, "")


def _written_by(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator writes into."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_leaves(given) if isinstance(one, Tensor))


def _contexts(block: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around a block's forward, and around its second run."""
    keeps, gives = create_selective_checkpoint_contexts(_keeps)  # type: ignore[no-untyped-call]  # torch
    watch = _Watch()
    return _Both(keeps, watch), _Both(_Unwritten(watch, block), gives)


class _Both:
    """Two contexts, which may be entered several times, one after the other."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException as error:
            self._outer.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._outer.__exit__(*error)


class _Unwritten:
    """Raises MisuseError, in the backward, where what is kept is no more what the forward has computed."""

    def __init__(self, watch: _Watch, block: str) -> None:
        self._watch, self._block = watch, block

    def __enter__(self) -> None:
        if by := self._watch.written:
            problem = f"the model writes in place into a matrix product or attention of the block {self._block} ({by})"
            raise MisuseError(f"{problem}, which engine.activation_checkpoint=selective keeps. {_REMEDY}")

    def __exit__(self, *_: object) -> None:
        pass


def _keeps(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
