"""A pretended GPU on torch for CPUs: its PrivateUse1 device, named ``pretend``, whose tensors have real numbers.

A tensor on it is a FakeTensor, so that torch's own rules about devices hold and autograd runs in a device thread, as on
CUDA; the numbers lie in the host's memory. ``use()`` registers it for the process, which is then a test's own: some of
torch is replaced. What it looks at, in ``STATE``:

- streams, by vector clocks: an operator has to wait for whoever wrote what it reads, and reads what it writes; memory
  that one stream frees while another uses it needs ``record_stream``;
- waits and reads of the host, by the function that does so; a copy to the host is NaN until somebody has waited for it;
- tensors of two devices in one operator or collective, which raise; memory that runs out at ``capacity`` bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

import distaccum

NAME = "pretend"
DEVICE = torch.device("privateuseone", 0)  # by the name that it has before it is renamed
_PACKAGE = f"{Path(distaccum.__file__).parent}/"
_TESTS = f"{Path(__file__).parents[2]}/tests/"
Clock = dict[int, int]  # a stream's number: how far it has got


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.number, self.at, self.device = len(STATE.streams), 0, DEVICE
        self.clock: Clock = {}
        self.freed: list[tuple[int, int, str]] = []  # memory of this stream's that another one may still use
        STATE.streams.append(self)

    def tick(self) -> int:
        self.at += 1
        self.clock[self.number] = self.at
        return self.at

    def compute(self) -> int:
        """An operator begins: it may be given memory that was freed before."""
        for stream, at, place in self.freed:
            if self.clock.get(stream, 0) < at:
                STATE.races.append(f"{where()} may reuse what another stream still uses ({place}): no record_stream")
        self.freed.clear()
        return self.tick()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for number, at in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), at)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        STATE.waits("stream.synchronize()", self.clock)

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or STATE.stream
        stream.tick()
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or STATE.stream).wait_event(self)

    def synchronize(self) -> None:
        STATE.waits("event.synchronize()", self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class State:
    """Of the device, and of what was seen of it since :meth:`forget`."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.blocks: dict[int, Memory] = {}  # by the storage's address
        self.allocated = self.peak = self.start = self.out_of_memory = 0
        self.capacity, self.is_there = 2**40, True
        self.sync_debug_mode: Any = "default"
        self.lock = threading.RLock()
        self.host = torch.Generator()  # the device's random numbers
        self._pending: list[tuple[int, int, Any]] = []  # copies to the host that nobody has waited for
        self._local = threading.local()
        self.forget()

    def forget(self) -> None:
        self.seen: Counter[str] = Counter()  # waits and reads of the host, by line
        self.races: list[str] = []
        self.collectives: Counter[str] = Counter()

    @property
    def stream(self) -> Stream:
        """This thread's."""
        return getattr(self._local, "stream", None) or self.streams[0]

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Any:
        before, self._local.stream = self.stream, stream or self.stream
        try:
            yield stream
        finally:
            self._local.stream = before

    def waits(self, how: str, clock: Clock | None = None, *, is_wait: bool = True) -> None:
        """The host waits, by default for all: copies to it that were made before are there then."""
        self.seen[f"{how} at {where()}"] += 1
        if self.sync_debug_mode == "error" and not is_wait:  # torch's does not see the wait for an event
            raise RuntimeError(f"called a synchronizing CUDA operation: {how}")
        clock = {stream.number: stream.at for stream in self.streams} if clock is None else clock
        due = [one for one in self._pending if clock.get(one[0], 0) >= one[1]]
        self._pending = [one for one in self._pending if one not in due]
        for _, _, arrive in due:
            arrive()

    def later(self, arrive: Any) -> None:
        """A copy to the host, which is there once somebody has waited for this moment."""
        self._pending.append((self.stream.number, self.stream.at, arrive))


def where() -> str:
    """The innermost function of the package that runs, or else of a test."""
    frame, test = sys._getframe(1), ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_PACKAGE):
            return f"{file.removeprefix(_PACKAGE)}:{name}"
        if file.startswith(_TESTS) and not test:
            test = f"{file.removeprefix(_TESTS)}:{name}"
        frame = frame.f_back
    return test or "a device thread"


class Memory:
    """The numbers behind one storage of the device; NaN until they are written."""

    def __init__(self, nbytes: int, storage: Any) -> None:
        if STATE.allocated + nbytes > STATE.capacity:
            STATE.out_of_memory += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes (pretended)")
        STATE.allocated += nbytes
        STATE.peak = max(STATE.peak, STATE.allocated)
        self.bytes = torch.full((nbytes,), 255, dtype=torch.uint8).untyped_storage()
        self.nbytes, self.stream = nbytes, STATE.stream
        self._written = (self.stream.number, self.stream.tick(), "its allocation")
        self._used: dict[int, tuple[int, str]] = {}
        self.recorded: set[int] = set()
        self._key = storage._cdata
        STATE.blocks[self._key] = self
        weakref.finalize(storage, self._free).atexit = False

    def _free(self) -> None:
        if STATE.blocks.get(self._key) is self:
            del STATE.blocks[self._key]
        STATE.allocated -= self.nbytes
        for stream, (at, place) in self._used.items():
            own = self.stream
            if stream != own.number and stream not in self.recorded and own.clock.get(stream, 0) < at:
                own.freed.append((stream, at, place))

    def touch(self, at: int, what: str, *, writes: bool) -> None:
        """An operator of this stream uses it."""
        stream = STATE.stream
        number, written, place = self._written
        if number != stream.number and stream.clock.get(number, 0) < written:
            STATE.races.append(f"{what} at {where()} does not wait for what another stream wrote ({place})")
        if writes:
            for other, (used, by) in self._used.items():
                if other != stream.number and stream.clock.get(other, 0) < used:
                    STATE.races.append(f"{what} at {where()} overwrites what another stream may read ({by})")
            self._written = (stream.number, at, where())
        self._used[stream.number] = (at, what if stream is self.stream else where())


def real(tensor: Tensor) -> Tensor:
    """The numbers of a tensor of the device."""
    storage = tensor.untyped_storage()
    memory = STATE.blocks.get(storage._cdata) or Memory(storage.nbytes(), storage)
    return torch.empty(0, dtype=tensor.dtype).set_(
        memory.bytes, tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
    )


STATE = State()
Stream()


aten = torch.ops.aten


def is_ours(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.fake_device.type == NAME


_PINNED: dict[int, Any] = {}


def _pin(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _PINNED[storage._cdata] = weakref.ref(storage, lambda _, key=storage._cdata: _PINNED.pop(key, None))
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _PINNED


# What takes a 0-dim tensor or an index of the host's beside the device's, and is no pointwise operator.
_TAKES_HOST = ("index", "_index_put_impl", "_unsafe_index", "_foreach_", "where", "masked_fill", "fill", "_fused_")


class Mode(TorchDispatchMode):
    """Within it the device's operators run: shapes and devices by torch's rules, numbers on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(func)
        if any(not issubclass(kind, FakeTensor | nn.Parameter | nn.Buffer) and kind is not Tensor for kind in types):
            return NotImplemented  # a DTensor, whose own parts come here
        if name.startswith("aten._pin_memory"):
            return _pin(args[0].clone())
        if name.startswith("aten.is_pinned"):
            return _is_pinned(args[0])
        pins = kwargs.pop("pin_memory", None)
        flat = tree_flatten((args, kwargs))[0]
        ours = [x for x in flat if is_ours(x)]
        if not ours and DEVICE.type not in [x.type for x in flat if isinstance(x, torch.device)]:
            found = func(*args, **kwargs)
            return _pin(found) if pins else found
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        with STATE.lock:
            return self._run(func, name, args, kwargs, ours)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, ours: list[Any]) -> Any:
        if name.startswith("c10d."):
            return self._collective(func, name, args, kwargs, ours)
        if func is aten._local_scalar_dense.default:
            STATE.waits("item()", is_wait=False)
            return func(real(args[0]))
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs)
        others = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and not is_ours(x)]
        takes = torch.Tag.pointwise in func.tags or name.split(".")[1].startswith(_TAKES_HOST)
        if others and ours and not takes:  # FakeTensor's rules are looser than CUDA's
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, found {NAME}:0 and cpu")
        known = {x.untyped_storage()._cdata for x in ours}
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            STATE.waits(name, is_wait=False)
            self._order(func, args, kwargs, ours)
            return tree_map_only(Tensor, self._wrapped, self._numbers(func, args, kwargs))
        except (NotImplementedError, UnsupportedOperatorException):  # a fused optimizer, which has no rule of shapes
            if func._schema.returns:
                raise
            out = None
        self._order(func, args, kwargs, ours)
        numbers = self._numbers(func, args, kwargs)
        for mine, value in zip(tree_flatten(out)[0], tree_flatten(numbers)[0], strict=True):
            if is_ours(mine) and mine.untyped_storage()._cdata not in known:
                self._adopt(mine, value)
        return out

    def _numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator gives on the host."""
        change = lambda x: real(x) if is_ours(x) else torch.device("cpu") if isinstance(x, torch.device) else x  # noqa: E731
        args, kwargs = tree_map(change, (args, kwargs))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            found = func(*args, **kwargs)
        else:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(STATE.host.get_state())
            found = func(*args, **kwargs)
            STATE.host.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)
        if str(func).startswith("_c10d_functional.") and "wait_tensor" not in str(func):
            STATE.collectives[f"{func} at {where()}"] += 1
            found = tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, found)
        return found

    def _wrapped(self, value: Tensor) -> Tensor:
        with self._fake:
            out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE)
        return self._adopt(out, value)

    def _adopt(self, mine: Tensor, value: Tensor) -> Tensor:
        """Gives a new tensor of the device its numbers."""
        storage = mine.untyped_storage()
        if storage._cdata not in STATE.blocks:
            Memory(max(storage.nbytes(), value.untyped_storage().nbytes() if mine.numel() else 0), storage)
            self._touch(mine, STATE.stream.tick(), "its allocation", writes=True)
            if mine.numel():
                real(mine).copy_(value)
        return mine

    def _touch(self, x: Tensor, at: int, what: str, *, writes: bool) -> None:
        memory = STATE.blocks.get(x.untyped_storage()._cdata)
        if memory is not None:
            memory.touch(at, what, writes=writes)

    def _order(self, func: Any, args: Any, kwargs: Any, ours: list[Any]) -> None:
        """Notes what the operator reads and writes."""
        schema, at, written = func._schema.arguments, STATE.stream.compute(), set()
        given = dict(zip([one.name for one in schema], args, strict=False)) | kwargs
        for one in schema:
            if one.alias_info is not None and one.alias_info.is_write:
                written |= {x.untyped_storage()._cdata for x in tree_flatten(given.get(one.name))[0] if is_ours(x)}
        for x in ours:
            self._touch(x, at, str(func), writes=x.untyped_storage()._cdata in written)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Between devices, or on one."""
        at, source = STATE.stream.compute(), args[0]
        target, free = None, bool(kwargs.get("non_blocking"))
        if func is aten.copy_.default:
            target, source, *rest = args
            free = free or bool(rest and rest[0])
        value = real(source) if is_ours(source) else source
        if is_ours(source):
            self._touch(source, at, "copy", writes=False)
        elif source.numel() and not (free and _is_pinned(source)) and not _is_same(target, source):
            STATE.waits("copy from memory that is not pinned", is_wait=False)
        if target is not None and not is_ours(target):
            return self._to_host(target, value, free=free)
        if target is not None:
            self._touch(target, at, "copy", writes=True)
            if not _is_same(target, value):
                real(target).copy_(value)
            with self._fake:
                func(target, source if is_ours(source) else source.new_empty(source.shape, device=DEVICE))
            return target
        dtype = kwargs.get("dtype") or source.dtype
        if torch.device(kwargs.get("device") or source.device).type != NAME:
            return self._to_host(torch.empty_like(value, dtype=dtype), value, free=False)
        like = torch.empty_like(value, dtype=dtype, memory_format=kwargs.get("memory_format") or torch.preserve_format)
        with self._fake:
            out = torch.empty_strided(like.size(), like.stride(), dtype=dtype, device=DEVICE)
        return self._adopt(out, value.to(dtype))

    def _to_host(self, target: Tensor, value: Tensor, *, free: bool) -> Tensor:
        if free and _is_pinned(target):
            taken = value.clone()
            if target.is_contiguous() and target.numel():
                target.view(-1).view(torch.uint8).fill_(255)  # NaN until somebody has waited
            STATE.later(lambda: target.copy_(taken))
            return target
        STATE.waits("copy to the host", dict(STATE.stream.clock), is_wait=False)
        return target.copy_(value)

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any, ours: list[Any]) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        if any(isinstance(x, Tensor) and not is_ours(x) for x in flat):
            raise RuntimeError(f"{name}: tensors of the host among those of the device")
        STATE.collectives[f"{name} at {where()}"] += 1
        at = STATE.stream.tick()
        for x in ours:
            self._touch(x, at, name, writes=True)
        host = [real(x) if is_ours(x) else x for x in flat]
        args, kwargs = tree_unflatten(host, spec)
        back = {(v.data_ptr(), v.shape): mine for mine, v in zip(flat, host, strict=True) if is_ours(mine)}
        return tree_map_only(Tensor, lambda v: back.get((v.data_ptr(), v.shape), v), func(*args, **kwargs))


def _is_same(target: Tensor | None, value: Tensor) -> bool:
    """Whether a tensor of the device has these very numbers: a collective has written them on the host."""
    mine = None if target is None or not is_ours(target) else real(target)
    return mine is not None and mine.data_ptr() == value.data_ptr() and mine.shape == value.shape


class Module:
    """``torch.pretend``, as ``torch.cuda`` is."""

    Stream, Event, default_generators = Stream, Event, (STATE.host,)
    is_available = staticmethod(lambda: STATE.is_there)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    device = staticmethod(lambda device: contextlib.nullcontext())
    get_device_name = staticmethod(lambda device=None: "a pretended GPU")
    is_bf16_supported = staticmethod(lambda including_emulation=True: True)
    is_tf32_supported = staticmethod(lambda: True)
    mem_get_info = staticmethod(lambda device=None: (STATE.capacity - STATE.allocated, STATE.capacity))
    memory_allocated = memory_reserved = staticmethod(lambda device=None: STATE.allocated)
    max_memory_allocated = max_memory_reserved = staticmethod(lambda device=None: STATE.peak)
    memory_stats = staticmethod(lambda device=None: {"num_alloc_retries": STATE.out_of_memory})
    reset_peak_memory_stats = staticmethod(lambda device=None: setattr(STATE, "peak", STATE.allocated))
    empty_cache = staticmethod(lambda: None)
    get_rng_state = staticmethod(lambda device=None: STATE.host.get_state())
    set_rng_state = staticmethod(lambda state, device=None: STATE.host.set_state(state))
    manual_seed_all = manual_seed = staticmethod(STATE.host.manual_seed)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    current_stream = staticmethod(lambda device=None: STATE.stream)
    default_stream = staticmethod(lambda device=None: STATE.streams[0])
    stream = staticmethod(STATE.on)
    synchronize = staticmethod(lambda device=None: STATE.waits("synchronize()"))
    set_sync_debug_mode = staticmethod(lambda mode: setattr(STATE, "sync_debug_mode", mode))


_NARROW = ("mm", "matmul", "addmm", "bmm", "baddbmm", "linear", "conv2d", "scaled_dot_product_attention")
_WIDE = ("layer_norm", "nll_loss", "cross_entropy_loss", "mse_loss", "softmax.int", "log_softmax.int")
_LIBRARIES: list[Any] = []


def _autocast() -> None:
    """What CUDA has built in: products in 16 bits, losses and norms in fp32, and nothing for the rest."""
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((every, own))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def casting(name: str, fixed: Any) -> Any:
        function = getattr(aten, name.partition(".")[0])

        def cast(*args: Any, **kwargs: Any) -> Any:
            dtype = fixed or torch.get_autocast_dtype(NAME)
            wide = lambda x: x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x  # noqa: E731
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return function(*tree_map_only(Tensor, wide, args), **tree_map_only(Tensor, wide, kwargs))

        return cast

    for name in (*_NARROW, *_WIDE):
        own.impl(name, casting(name, torch.float32 if name in _WIDE else None), "AutocastPrivateUse1")


def _swap(one: Tensor, other: Tensor) -> None:
    """``torch.utils.swap_tensors``, also where somebody has a weak reference to one."""
    kinds, words = (type(one), type(other)), (dict(one.__dict__), dict(other.__dict__))
    one.__class__, other.__class__ = kinds[1], kinds[0]
    one.__dict__.clear()
    other.__dict__.clear()
    one.__dict__.update({**words[1], **{k: v for k, v in words[0].items() if k not in words[1]}})
    other.__dict__.update(words[0])
    torch._C._swap_tensor_impl(one, other)


def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
    """In the place of ``Module._apply``, which swaps FakeTensors: a parameter stays the same object."""
    for module in self.modules() if recurse else (self,):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                new = fn(parameter)
            if new is not parameter and is_ours(new) and not is_ours(parameter):
                _swap(parameter, nn.Parameter(new, parameter.requires_grad))
            elif new is not parameter:
                module._parameters[key] = nn.Parameter(new, parameter.requires_grad)
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else fn(buffer)
    return self


def _copied(tensor: Tensor, memo: Any) -> Tensor:
    new = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo.setdefault(id(tensor), nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if is_ours(value) and not is_ours(tensor):
        own = value.detach().requires_grad_(tensor.requires_grad)
        _swap(tensor, nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own)
    else:
        torch._C.TensorBase.data.__set__(tensor, value)


def _guard() -> Path:
    """The compiled device guard for this torch: two seconds, the first time in a checkout."""
    from torch.utils.cpp_extension import include_paths  # noqa: PLC0415  a second to import

    source = Path(__file__).with_name("guard.cpp")
    of = f"{torch.__version__}-{crc32(source.read_bytes()):08x}"
    made = Path(__file__).with_name("__pycache__") / f"guard-{of}.so"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        own, lib = made.with_suffix(f".{os.getpid()}"), Path(torch.__file__).parent / "lib"
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        flags = ["-shared", "-fPIC", "-O1", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        command = ["g++", *flags, *(f"-I{path}" for path in include_paths()), source, "-o", own, f"-L{lib}", "-lc10"]
        subprocess.run(list(map(str, command)), check=True)  # noqa: S603  our own words
        own.replace(made)
    return made


def missing() -> str:
    """Why there can be no pretended GPU here; empty if it can."""
    private = {torch._C: "_swap_tensor_impl _set_only_lift_cpu_tensors _acc _ExcludeDispatchKeyGuard"}
    lacks = [name for place, names in private.items() for name in names.split() if not hasattr(place, name)]
    return "no g++" if shutil.which("g++") is None else f"torch has no {', '.join(lacks)}" if lacks else ""


def use() -> Mode:
    """Registers the device in this process; returns the mode that has to be entered."""
    from torch.utils import backend_registration  # noqa: PLC0415

    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, Module)
    torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    ctypes.CDLL(str(_guard()))
    _autocast()
    torch._C._set_only_lift_cpu_tensors(True)  # of torch.tensor(..., device=): the copy to the device is seen
    dist.Backend.register_backend("pretended", lambda *_: None, devices=[NAME])
    Tensor.record_stream = lambda self, stream: (
        STATE.blocks[self.untyped_storage()._cdata].recorded.add(stream.number) if is_ours(self) else None
    )
    nn.Module._apply = _apply
    FakeTensor.data_ptr = lambda tensor: real(tensor).data_ptr() if is_ours(tensor) else 0
    FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()  # one copy, as on CUDA, and not an item after the other
    FakeTensor.__deepcopy__ = _copied
    Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)
    return Mode()
