"""One window of unequal micro-batches: how far the weights move, beside fp64, through an engine and in a plain loop.

The weights lose ``RATE`` times the gradient (SGD), so their change shows the normaliser, the reduction and the step of
any engine. The truth is one process in fp64 on the CPU, with the whole batch in one forward. What a number format and a
device's kernels round away differs between machines, so an error is judged beside that of a loop which anybody would
write, in the same format on the same device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from distaccum import Accumulator, CompileConfig, DataSpec, PrecisionConfig, World
from distaccum.config.engine import EngineConfig
from distaccum.config.precision import ScalerConfig
from distaccum.engines.state import gathered
from distaccum.losses.cross_entropy import count_labels, cross_entropy
from distaccum.models.gpt import GPT

SAMPLES = 19
MICRO_SIZES = {1: 5, 2: 3}  # on one rank the last micro-batch is smaller; of two ranks one has a micro-batch less
IGNORED = -100
RATE = 16.0  # a change is then large beside what fp32 weights round
SCALE_POWER = 10  # of the first loss scale: no gradient here is too large for fp16
TIMES = 3  # an error over a plain loop's: sums in another order round otherwise, a wrong normaliser is far above
COMPUTE = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PLAIN_MOST = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 3e-2, "fp16": 4e-3}  # or the truth is another computation's
Weights = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window of tokens, and the GPT that is trained on it.

    ``length``: tokens of a sample; ``width``: of the model; ``vocabulary``: token ids.
    """

    length: int = 128
    width: int = 128  # two heads of 64, for which every attention kernel is made
    vocabulary: int = 512

    @classmethod
    def of(cls, *, small: bool) -> Window:
        """The small one is a matter of moments on a CPU, in fp16 too."""
        return cls(length=12, width=16, vocabulary=32) if small else cls()

    def model(self) -> GPT:
        """The same weights for every engine."""
        torch.manual_seed(0)
        sizes = {"vocab_size": self.vocabulary, "seq_len": self.length, "n_embd": self.width}
        return GPT(**sizes, n_layer=2, n_head=2)

    def samples(self) -> list[Batch]:
        """Tokens and labels, each of shape (length); the labels count up to a length of the sample's own."""
        generator = torch.Generator().manual_seed(1)
        found = []
        for _ in range(SAMPLES):
            ids = torch.randint(0, self.vocabulary, (self.length + 1,), generator=generator)
            own = int(torch.randint(1, self.length + 1, (), generator=generator))
            found.append((ids[:-1], torch.where(torch.arange(self.length) < own, ids[1:], IGNORED)))
        return found

    def truth(self) -> Weights:
        """The weights after the step, in fp64."""
        model = self.model().double()
        inputs, labels = _stacked(self.samples())
        F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()
        return {name: (p - RATE * p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}

    def error(self, after: Weights, true: Weights) -> float:
        """Of the weights' change, relative to the true one's 2-norm over all weights."""
        before = self.model().state_dict()
        wrong = torch.cat([(after[name].double() - true[name]).flatten() for name in true])
        moved = torch.cat([(before[name].double() - true[name]).flatten() for name in true])
        return float(wrong.norm() / moved.norm())

    def plain(self, precision: str, device: torch.device, size: int) -> Weights:
        """The weights after a plain loop over micro-batches of ``size``: sums over the window's count, one step."""
        model, samples = self.model().to(device), self.samples()
        optimizer = SGD(model.parameters(), lr=RATE)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**SCALE_POWER, enabled=precision == "fp16")
        count, dtype = sum(count_labels(labels) for _, labels in samples), COMPUTE[precision]
        _multiply_in_tf32(device, wanted=precision == "tf32")
        for begin in range(0, SAMPLES, size):
            inputs, labels = _stacked(samples[begin : begin + size], device)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                logits = model(inputs).flatten(0, 1).float()
            total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            scaler.scale(total / count).backward()
        scaler.step(optimizer)
        _multiply_in_tf32(device, wanted=False)
        return _on_host(model.state_dict())

    def ours(
        self, engine: EngineConfig, precision: str, world: World, *, settings: CompileConfig | None = None
    ) -> Weights:
        """The weights after the window through an engine, compiled by ``settings``, on every rank; a collective.

        Raises:
            RuntimeError: the window made no step, or nothing was compiled.
        """
        model = self.model()
        acc = Accumulator(
            model,
            SGD(model.parameters(), lr=RATE),
            global_batch_size=SAMPLES,
            micro_batch_size=MICRO_SIZES[world.size],
            count=lambda batch: count_labels(batch[1]),
            engine=engine,
            precision=PrecisionConfig(name=precision, scaler=ScalerConfig(initial_scale_power=SCALE_POWER)),
            compile=settings or "none",
            world=world,
        )
        try:
            for window in acc.windows(DataSpec(train=self.samples(), description="random tokens", shuffle=False)):
                for micro in window:
                    with acc.accumulate():
                        inputs, labels = micro.batch
                        acc.backward(cross_entropy(acc.model(inputs), labels)[0])
            if acc.last is None or not acc.last.applied:
                raise RuntimeError("the window made no step")
            if settings is not None and not (acc.engine.compiled and acc.engine.compiled.graphs):
                raise RuntimeError("nothing was compiled")
            return _on_host(gathered(acc.engine.state().model, world))
        finally:
            acc.close()


def _stacked(samples: list[Batch], device: torch.device | None = None) -> Batch:
    inputs, labels = (torch.stack(part).to(device) for part in zip(*samples, strict=True))
    return inputs, labels


def _on_host(weights: Mapping[str, Tensor]) -> Weights:
    return {name: weight.detach().cpu().clone() for name, weight in weights.items()}


def _multiply_in_tf32(device: torch.device, *, wanted: bool) -> None:
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = wanted


def digest(weights: Mapping[str, Tensor]) -> str:
    """Tells weights that differ in any bit."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
