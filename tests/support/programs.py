"""Programs as users write them: each is exact on every engine, or refused by one message before a weight moves.

A program is a model, an optimizer and the sum of a loss, sometimes with a loop of its own. Its truth is a plain torch
loop over whole windows in fp64 on one process. It shares with distaccum what the user brings, and nothing else.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

FEATURES, WIDTH, CLASSES = 6, 8, 4
# The last window has two micro-batches on rank 0 and one on rank 1.
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SAMPLES = 8, 2, 21
ENGINES = ("ddp", "zero1", "fsdp2", "deepspeed")
Batch = dict[str, Tensor]
Sums = Tensor | Mapping[str, Tensor]


def samples() -> list[Batch]:
    """The data of every program; the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    real = partial(torch.randn, generator=generator, dtype=torch.float64)
    whole = partial(torch.randint, generator=generator)
    return [
        {
            "x": real(FEATURES),
            "twin": real(FEATURES),
            "y": real(1),
            "tokens": whole(1, 11, (5,)),
            "length": whole(1, 6, ()),
            "labels": torch.where(whole(0, 3, (5,)) > 0, whole(0, CLASSES, (5,)), -100),
            "branch": torch.tensor(i % GLOBAL_BATCH_SIZE < GLOBAL_BATCH_SIZE // 2),  # a window's first half: rank 0's
        }
        for i in range(SAMPLES)
    ]


def windows() -> Iterator[Batch]:
    """The whole batches of the windows, in the data's own order."""
    data = samples()
    for begin in range(0, SAMPLES, GLOBAL_BATCH_SIZE):
        yield default_collate(data[begin : begin + GLOBAL_BATCH_SIZE])


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its real numbers in ``dtype``."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


class Block(nn.Module):
    """A residual one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Net(nn.Module):
    """``(B, features)`` to ``(B, 1)``."""

    def __init__(self, blocks: int = 2, features: int = FEATURES, width: int = WIDTH) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(features, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum()


def samples_of(batch: Batch) -> int:
    return len(batch["x"])


def labels_of(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


def sgd(model: nn.Module) -> Optimizer:
    """Plain, so that a wrong factor is seen as one."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


Count = Callable[[Batch], Any]
AfterWindow = Callable[[nn.Module, Optimizer], dict[str, Tensor]]


def unchanged(model: nn.Module) -> nn.Module:
    """What most programs do with a model before it trains: nothing."""
    return model


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a user brings.

    Args:
        model: with the same weights at every call.
        loss: the sum, or sums by name, over what ``count`` counts.
        optimizer: of the model.
        count: what the loss averages over.
        options: further arguments of the Accumulator.
        stream: the data is each rank's own generator of micro-batches.
        probe: called between windows with the model that the user calls and a batch; not in the truth.
        wrapped: what the user calls in place of ``acc.model``, made of it.
        prepared: called with the model before an accumulator or a loop has it.
        after_window: makes what is called with model and optimizer after every step; it returns what to compare too.
        finish: called in the truth between backward and step.
        truth: another road to the weights after all windows, in a dtype: in place of the plain loop.
        loop: another loop: given ``(engine, world, note)``, it returns weights, and gives ``note`` accumulators.
    """

    model: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Batch], Any] = squares
    optimizer: Callable[[nn.Module], Any] = sgd
    count: Count = samples_of
    options: Mapping[str, Any] = field(default_factory=dict)
    probe: Callable[[nn.Module, Batch], None] | None = None
    stream: bool = False
    wrapped: Callable[[nn.Module], nn.Module] = unchanged
    prepared: Callable[[nn.Module], nn.Module] = unchanged
    after_window: Callable[[], AfterWindow] | None = None
    finish: Callable[[nn.Module], None] | None = None
    truth: Callable[[torch.dtype], dict[str, Tensor]] | None = None
    loop: Callable[[Any, Any, Any], dict[str, Tensor]] | None = None


def start(program: Program, dtype: torch.dtype) -> nn.Module:
    """The program's model, the same at every call; ``dtype`` replaces fp32 alone."""
    torch.manual_seed(2)
    model = program.model()
    for tensors in (module._parameters | module._buffers for module in model.modules()):
        for tensor in filter(None.__ne__, tensors.values()):
            if tensor.dtype is torch.float32 or (tensor.dtype is torch.bfloat16 and dtype is torch.float64):
                tensor.data = tensor.data.to(dtype)
            elif tensor.dtype is torch.complex64:
                tensor.data = tensor.data.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return program.prepared(model)


def before(program: Program) -> dict[str, Tensor]:
    if program.truth is gan_truth:
        return gan_truth(torch.float64, steps=0)
    return weights_of(start(program, torch.float64))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, as fp64 copies."""
    wide = {name: torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for name, p in named(model)}
    return {name: tensor.double().clone() for name, tensor in wide.items()}


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters, by the names that they have in no wrapper."""
    for name, parameter in model.named_parameters():
        yield name.replace("_orig_mod.", ""), parameter


def plain_loop(program: Program, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights after a hand-written loop over whole windows."""
    if program.truth is not None:
        return program.truth(dtype)
    model = start(program, dtype)
    made = program.optimizer(model)
    optimizers: Sequence[Optimizer] = made if isinstance(made, list) else [made]
    called, kept = program.wrapped(model), dict[str, Tensor]()
    after_window = program.after_window() if program.after_window else None
    for batch in (cast(window, dtype) for window in windows()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sums, counts = program.loss(called, batch), program.count(batch)
        parts = sums if isinstance(sums, Mapping) else {"": sums}
        numbers = counts if isinstance(counts, Mapping) else {"": counts}
        torch.stack([parts[name] / numbers[name] for name in parts]).sum().backward()
        if program.finish is not None:
            program.finish(model)
        for optimizer in optimizers:
            optimizer.step()
        if after_window is not None:
            kept = after_window(model, optimizers[0])
    return weights_of(model) | {name: tensor.detach().double() for name, tensor in kept.items()}


def error(found: Mapping[str, Tensor], truth: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """Of the change of all weights (and means of them) together, relative to the truth's, in the 2-norm."""
    off = sum(float((found[name].double() - truth[name]).square().sum()) for name in truth)
    moved = sum(float((truth[name] - before[name.removeprefix("mean.")]).square().sum()) for name in truth)
    return (off / moved) ** 0.5 if moved else (0.0 if off == 0.0 else float("inf"))


# What users bring -----------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Two modules in one, as an accumulator wants them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.first(x), self.second(x if y is None else y)


def generator_net() -> nn.Module:
    """Of a GAN: ``(B, FEATURES)`` to ``(B, FEATURES)``."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES))


class Gan(nn.Module):
    """Generator and discriminator; ``forward`` gives both losses, each with a gradient for its own part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = generator_net(), Net()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        fake = self.g(batch["x"])
        real, made = self.d(batch["twin"]), self.d(fake.detach())
        frozen = {name: p.detach() for name, p in self.d.named_parameters()}
        fooled = torch.func.functional_call(self.d, frozen, (fake,))
        return {"d": (F.softplus(-real) + F.softplus(made)).sum(), "g": F.softplus(-fooled).sum()}


def gan_truth(dtype: torch.dtype, steps: int | None = None) -> dict[str, Tensor]:
    """Alternating updates by hand: the discriminator's, then the generator's through the new discriminator."""
    torch.manual_seed(2)
    g, d = generator_net().to(dtype), Net().to(dtype)
    of_g, of_d = sgd(g), sgd(d)
    for batch in (cast(window, dtype) for window in islice(windows(), steps)):
        of_d.zero_grad()
        (d_loss(d, g, batch) / samples_of(batch)).backward()
        of_d.step()
        of_g.zero_grad()
        (F.softplus(-d(g(batch["x"]))).sum() / samples_of(batch)).backward()
        of_g.step()
    return {f"g.{k}": v for k, v in weights_of(g).items()} | {f"d.{k}": v for k, v in weights_of(d).items()}


def d_loss(d: nn.Module, g: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        fake = g(batch["x"])
    return (F.softplus(-d(batch["twin"])) + F.softplus(d(fake))).sum()


def gan_loop(engine: Any, world: Any, note: Callable[[Any], Any]) -> dict[str, Tensor]:
    """The same with an accumulator each."""
    from distaccum import Accumulator  # noqa: PLC0415
    from tests.distributed.workers.engine_matrix import weights_of as whole  # noqa: PLC0415

    torch.manual_seed(2)
    g, d = generator_net(), Net()
    sizes: Any = {"global_batch_size": GLOBAL_BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "count": samples_of}
    of_g, of_d = (note(Accumulator(m, sgd(m), engine=engine, world=world, **sizes)) for m in (g, d))
    data = spec()
    for for_d, for_g in zip(of_d.windows(data), of_g.windows(data), strict=True):
        for micro in for_d:
            with of_d.accumulate():
                of_d.backward(d_loss(of_d.model, of_g.model, cast(micro.batch, torch.float32)))
        for micro in for_g:
            with of_g.accumulate():
                fake = of_g.model(cast(micro.batch, torch.float32)["x"])
                of_g.backward(F.softplus(-of_d.model(fake)).sum())
    parts = {"g": whole(of_g.engine, world), "d": whole(of_d.engine, world)}
    return {f"{part}.{name}": tensor.double() for part, found in parts.items() for name, tensor in found.items()}


def spec() -> Any:
    """The data as distaccum takes it, in its own order."""
    from distaccum import DataSpec  # noqa: PLC0415

    return DataSpec(train=samples(), eval_dataset=None, description="programs", shuffle=False)


def stream(rank: int, world_size: int) -> Iterator[Batch]:
    """A rank's own micro-batches, which make up the same windows: every part of one that is its turn."""
    for window in windows():
        size = len(window["x"])
        parts = [range(i, min(i + MICRO_BATCH_SIZE, size)) for i in range(0, size, MICRO_BATCH_SIZE)]
        for part in parts[rank::world_size]:
            yield {name: value[part.start : part.stop] for name, value in window.items()}


class Lora(nn.Module):
    """A frozen base, and low-rank updates of it that train."""

    def __init__(self, base: torch.dtype) -> None:
        super().__init__()
        self.base = Net().to(base).requires_grad_(False)
        self.a, self.b = nn.Linear(FEATURES, 3, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        held = self.base.enter.weight.dtype
        return self.base(x.to(held)).to(x.dtype) + self.b(self.a(x))


class Lstm(nn.Module):
    """Over packed sequences of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.leave = nn.Embedding(11, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True), Net(0)
        self.out = nn.Linear(WIDTH, FEATURES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.leave(self.out(hidden[-1]))


class Tagger(nn.Module):
    """``(B, T)`` tokens to ``(B, T, CLASSES)`` logits; the embedding may be the output's weight too."""

    def __init__(self, *, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11 if tied else CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def tagged(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy summed over labels that are not ignored."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


class Checkpointed(Net):
    """Blocks whose activations are computed again; with ``shared`` one block is used twice."""

    def __init__(self, *, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.order = [0, 1, 0] if shared else [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for i in self.order:
            x = checkpoint(self.blocks[i], x, use_reentrant=self.reentrant)
        return self.leave(x)


class Branches(Net):
    """A branch that no sample uses, or one that some samples do."""

    def __init__(self, *, sometimes: bool) -> None:
        super().__init__()
        self.rare = nn.Linear(FEATURES, 1)
        self.sometimes = sometimes

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        out = super().forward(x)
        if self.sometimes and bool(branch.any()):
            out = out + self.rare(x) * branch.unsqueeze(1)
        return out


@dataclass
class Output:
    """What models return in place of tuples."""

    hidden: Tensor
    prediction: Tensor


class Returns(Net):
    """Returns an object of a ``kind``."""

    def forward(self, x: Tensor) -> Any:
        return getattr(self, "kind", Output)(hidden=x, prediction=super().forward(x))


class Normed(Net):
    """Weight norm by torch's parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.enter)


class Complex(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, WIDTH, dtype=torch.complex64))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave((x.to(self.weight.dtype) @ self.weight).abs())


class Scaled(Net):
    """A weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Ema:
    """A running mean of the weights, by hand."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module, _: Optimizer) -> dict[str, Tensor]:
        for name, p in named(model):
            self.mean.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.3)
        return {f"mean.{name}": tensor for name, tensor in self.mean.items()}


class Averaged:
    """Torch's AveragedModel."""

    def __init__(self) -> None:
        self.average: Any = None

    def __call__(self, model: nn.Module, _: Optimizer) -> dict[str, Tensor]:
        if self.average is None:
            self.average = torch.optim.swa_utils.AveragedModel(model)
        self.average.update_parameters(model)
        return {f"mean.{name}": tensor for name, tensor in self.average.module.named_parameters()}


class LowersTheRate:
    """A schedule by hand: what Plateau does, in the user's own loop."""

    def __call__(self, _: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        for group in optimizer.param_groups:
            group["lr"] *= 0.3
        return {}


def distilled(model: nn.Module, batch: Batch) -> Tensor:
    """Against a teacher outside of the model."""
    torch.manual_seed(9)
    teacher = Net().to(batch["x"].dtype).eval()
    with torch.no_grad():
        target = teacher(batch["x"])
    return (model(batch["x"]) - target).square().sum()


def self_taught(model: nn.Module, batch: Batch) -> Tensor:
    """Against the same model under ``no_grad``, on another view."""
    with torch.no_grad():
        target = model(batch["twin"])
    return (model(batch["x"]) - target - batch["y"]).square().sum()


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - model(batch["twin"]) - batch["y"]).square().sum()


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """The squared norm of the gradient of each output by its input, which is differentiated again."""
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - batch["y"]).square().sum() + slope.square().sum()


def two_losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(batch["tokens"])
    labels = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    return {"labels": labels, "score": (logits.mean((1, 2)) - batch["y"][:, 0]).square().sum()}


def hooked(model: nn.Module) -> nn.Module:
    """A hook on a parameter, from before the model is wrapped."""
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    return model


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def probe(model: nn.Module, batch: Batch) -> None:
    """A saliency map of the trained weights: a backward that nobody steps on."""
    model(batch["x"]).abs().sum().backward()


def tower_loss(model: nn.Module, batch: Batch) -> Tensor:
    one, other = model(batch["x"], batch["twin"])
    return (one * other - batch["y"]).square().sum()


def opt(kind: str, **options: Any) -> Callable[[nn.Module], Optimizer]:
    """Of torch.optim, over what trains."""
    return lambda model: getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], **options)


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01, eps=1e-2)]


class Beside(torch.autograd.Function):
    """Adds a term to the loss by its gradient alone, as some mixtures of experts balance themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones(())


class Injects(Net):
    """A term of a micro-batch's mean, beside the loss."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        return super().forward(x) + self.leave(Beside.apply(hidden, 0.1 * hidden.square().mean()))  # type: ignore[no-untyped-call]


class Follows(Net):
    """A frozen teacher moves towards the student in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.bias.mul_(0.5).add_(self.leave.bias, alpha=0.5)
        return super().forward(x) - self.teacher(x)


class UnitRows(Net):
    """A head whose weight the forward normalizes in place, as in metric learning."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.leave.weight.copy_(F.normalize(self.leave.weight, dim=1))
        return super().forward(x)


class Conv(nn.Sequential):
    """Of weights that are not contiguous."""

    def __init__(self) -> None:
        super().__init__(nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 4, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))
        self.to(memory_format=torch.channels_last)


class Late(SGD):
    """From its second step on it clips by the norm of all gradients."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.steps > 1:
            nn.utils.clip_grad_norm_(held, 0.1)
        return super().step(closure)


class Signs(Optimizer):
    """Steps by signs, with a function of its own, as Lion does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.003})
        self.update = lambda p, g: p.sub_(0.003 * g.sign())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad)


class Sam(SGD):
    """Runs the model again."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sam wants a closure"


class Lookahead(SGD):
    """Slow weights follow at every second step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        held = [p for group in self.param_groups for p in group["params"]]
        for slow, p in zip(self.slow, held, strict=False) if self.steps % 2 == 0 else ():
            p.copy_(slow.lerp_(p, 0.5))


def with_hooks(hook: Callable[[Tensor], Any], *, after: bool = False) -> Callable[[nn.Module], nn.Module]:
    """On every parameter, from before the model is wrapped."""

    def prepared(model: nn.Module) -> nn.Module:
        for p in model.parameters():
            (p.register_post_accumulate_grad_hook if after else p.register_hook)(hook)
        return model

    return prepared


def steps_alone(p: Tensor) -> None:
    p.data.sub_(0.05 * p.grad)  # type: ignore[operator]
    p.grad = None


def clips_outputs(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["x"])
    out.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return (out - batch["y"]).square().sum()


def by_class(model: nn.Module, batch: Batch) -> Tensor:
    """A mean, which torch divides by the weights of the labels, times the number of these."""
    logits, labels = model(batch["tokens"])[:, 0], batch["length"] % CLASSES
    weight = torch.tensor([0.2, 1.0, 3.0, 7.0]).to(logits)
    return F.cross_entropy(logits, labels, weight=weight) * len(labels)


def decayed(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch) + 0.01 * len(batch["x"]) * sum(p.square().sum() for p in model.parameters())


def of_some(model: nn.Module, batch: Batch) -> Tensor:
    """Of what is found in a batch: a constant where there is nothing."""
    found, some = model(batch["x"]), batch["length"] > 3
    if not bool(some.any()):
        return torch.zeros((), dtype=batch["x"].dtype)
    return (found[some] - batch["y"][some]).square().sum()


def evaluated(model: nn.Module, batch: Batch) -> None:
    with torch.inference_mode():
        model(batch["x"])


predicted: Any = lambda model, b: (model(b["x"]).prediction - b["y"]).square().sum()  # noqa: E731
PROGRAMS: dict[str, Program] = {
    "plain": Program(),
    "GAN, one accumulator": Program(
        model=Gan,
        loss=lambda model, batch: model(batch),
        count=lambda batch: {"d": len(batch["x"]), "g": len(batch["x"])},
        optimizer=lambda model: [SGD(model.g.parameters(), lr=0.05), SGD(model.d.parameters(), lr=0.05)],
    ),
    "GAN, two accumulators": Program(truth=gan_truth, loop=gan_loop),
    "contrastive dual forward": Program(loss=contrastive),
    "two towers": Program(model=lambda: Twice(Net(), Net()), loss=tower_loss),
    "LoRA, fp32 base": Program(model=partial(Lora, torch.float32)),
    "LoRA, bf16 base": Program(model=partial(Lora, torch.bfloat16)),
    "distillation": Program(loss=distilled),
    "same model under no_grad as teacher": Program(loss=self_taught),
    "multi-task with two counts": Program(
        model=Tagger, loss=two_losses, count=lambda batch: {"labels": labels_of(batch), "score": len(batch["x"])}
    ),
    "packed LSTM": Program(model=Lstm, loss=lambda model, b: (model(b["tokens"], b["length"]) - b["y"]).square().sum()),
    "segmentation with ignore_index": Program(model=Tagger, loss=tagged, count=labels_of),
    "checkpointing, reentrant": Program(model=partial(Checkpointed, reentrant=True)),
    "checkpointing, not reentrant": Program(model=partial(Checkpointed, reentrant=False)),
    "checkpointing, shared block": Program(model=partial(Checkpointed, reentrant=False, shared=True)),
    "checkpointing, shared block, reentrant": Program(model=partial(Checkpointed, reentrant=True, shared=True)),
    "tied embeddings": Program(model=partial(Tagger, tied=True), loss=tagged, count=labels_of),
    "EMA by hand": Program(after_window=Ema),
    "AveragedModel": Program(after_window=Averaged),
    "learning rate set by hand": Program(after_window=LowersTheRate),
    "ReduceLROnPlateau as scheduler": Program(options={"scheduler": "plateau"}),
    "generator of batches": Program(stream=True),
    "LBFGS": Program(optimizer=opt("LBFGS", lr=0.1)),
    "compile before": Program(prepared=lambda model: torch.compile(model, backend="eager")),  # type: ignore[arg-type, return-value]
    "compile in place": Program(prepared=lambda model: model.compile(backend="eager") or model),  # type: ignore[func-returns-value]
    "compile after": Program(wrapped=lambda model: torch.compile(model, backend="eager")),  # type: ignore[arg-type, return-value]
    "unused branch": Program(
        model=partial(Branches, sometimes=False),
        loss=lambda model, b: (model(b["x"], b["branch"]) - b["y"]).square().sum(),
        optimizer=opt("AdamW", lr=0.01, eps=1e-2, weight_decay=0.1),
    ),
    "branch used by one rank": Program(
        model=partial(Branches, sometimes=True),
        loss=lambda model, b: (model(b["x"], b["branch"]) - b["y"]).square().sum(),
    ),
    "dataclass output": Program(model=Returns, loss=predicted),
    "weight norm": Program(model=Normed),
    "complex parameter": Program(model=Complex),
    "0-dim parameter": Program(model=Scaled),
    "gradient penalty": Program(loss=penalised),
    "parameter hook": Program(prepared=hooked),
    "loss without gradient": Program(loss=lambda model, b: squares(model, b).detach()),
    "sparse embedding": Program(model=partial(Tagger, sparse=True), loss=tagged, count=labels_of),
    "probe backward between windows": Program(probe=probe),
    "clipping": Program(finish=clipped, options={"clip_norm": 0.1}),
    "Adagrad": Program(optimizer=opt("Adagrad", lr=0.05, initial_accumulator_value=0.1)),
    "Adafactor": Program(optimizer=opt("Adafactor", lr=0.01)),
    "RAdam": Program(optimizer=opt("RAdam", lr=0.01, eps=1e-2)),
    "object output": Program(
        model=Returns, loss=predicted, prepared=lambda m: setattr(m, "kind", SimpleNamespace) or m
    ),
    "clip of each output's gradient": Program(loss=clips_outputs),
    "parameter hook that clamps": Program(prepared=with_hooks(lambda gradient: gradient.clamp(-0.05, 0.05))),
    "optimizer in the backward": Program(prepared=with_hooks(steps_alone, after=True)),
    "term beside the loss": Program(model=Injects),
    "mean by weights of classes": Program(model=Tagger, loss=by_class),
    "teacher that follows": Program(model=Follows),
    "weights normalized in the forward": Program(model=UnitRows),
    "penalty over the parameters": Program(loss=decayed),
    "channels_last": Program(model=Conv),
    "count from one on": Program(loss=of_some, count=lambda batch: max(1, int((batch["length"] > 3).sum()))),
    "micro-batches that count nothing": Program(loss=of_some, count=lambda batch: int((batch["length"] > 3).sum())),
    "evaluation in inference mode": Program(probe=evaluated),
    "optimizer that couples late": Program(optimizer=lambda model: Late(model.parameters(), lr=0.05)),
    "optimizer with a function of its own": Program(optimizer=lambda model: Signs(model.parameters())),
    "optimizer that runs the model again": Program(optimizer=lambda model: Sam(model.parameters(), lr=0.05)),
    "optimizer with slow weights in a list": Program(optimizer=lambda model: Lookahead(model.parameters())),
    "Nesterov": Program(optimizer=opt("SGD", lr=0.05, momentum=0.9, nesterov=True)),
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    PROGRAMS["Muon"] = Program(optimizer=muon)

# Refused in the first window that cannot be exact, after others that were.
LATE = {("GAN, two accumulators", "fsdp2")}
# Their forwards move weights, which no step does then.
WRITE = ("teacher that follows", "weights normalized in the forward")
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def table() -> dict[str, dict[str, str]]:
    """The table of the documentation: by program and engine words of the message; none where it is exact."""
    lists, rows = re.split(r"\| program .*\n.*\n", PAGE.read_text().split("Exact on every engine: ")[1], maxsplit=1)
    exact, refused = (" ".join(names.split()).rstrip(".") for names in lists.split("Refused on every engine: "))
    found = {name: dict.fromkeys(ENGINES, "") for name in exact.split("; ")}
    for name, words in re.findall(r"([^;“]+) \(“(.+?)”\)", refused):
        found[name.strip()] = dict.fromkeys(ENGINES, words)
    for name, *cells in re.findall(
        r"^\| (.+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", rows.split("\n\n")[0], re.MULTILINE
    ):
        told = [cell if cell == "exact" else re.fullmatch("refused: “(.+)”", cell)[1] for cell in cells]  # type: ignore[index]
        found[name] = {engine: words.removeprefix("exact") for engine, words in zip(ENGINES, told, strict=True)}
    return found
