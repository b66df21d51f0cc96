"""What holds in every right program: programs that break a relation are told before a step, others train exactly."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import _AllGather
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from distaccum import Accumulator, DataSpec, DistaccumError, FSDP2Config, World, all_gather
from distaccum.engines.compiled import _BESIDE, uncompiled
from tests.support.accumulators import over_sgd
from tests.support.programs import Beside
from tests.support.threads import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")  # of fp16 on a CPU
EXACT, SAMPLES, WINDOW = 5e-6, 24, 8
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Two layers, with ``does`` what a case is of."""

    def __init__(
        self, does: Callable[[Net, Tensor], Tensor] | None = None, hook: Any = None, after: Any = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)
        self.teacher = nn.Linear(6, 1).requires_grad_(False)
        self.calls, self.seen, self.graph = 0, list[int](), torch.eye(2).to_sparse()
        self.register_buffer("center", torch.zeros(8))
        self.queue, self.mask = torch.zeros(4, 8), torch.zeros(())
        self.does = does
        if hook is not None:
            self.a.weight.register_hook(hook)
        for p in (self.a.weight, self.b.weight) if after is not None else ():
            p.register_post_accumulate_grad_hook(after)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x)) if self.does is None else self.does(self, x)
        return self.b(hidden)


class WithBias(nn.Linear):
    """Gives its bias too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.bias


def with_its_bias() -> Net:
    net = Net(lambda net, x: torch.tanh(net.a(x)[0]))
    net.a = WithBias(6, 8)
    return net


def clipped(net: Net, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.a(x))
    if hidden.requires_grad:
        hidden.register_hook(lambda g: g.clamp(-0.02, 0.02))
    return hidden


def normalized(net: Net, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.a(x))
    if hidden.requires_grad:
        hidden.register_hook(lambda g: g / g.norm())
    return hidden


def injected(over: Any) -> Any:
    return lambda net, x: Beside.apply(h := torch.tanh(net.a(x)), over(h.square()))  # type: ignore[no-untyped-call]


def follows(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.teacher.weight.mul_(0.5).add_(net.a.weight[:1], alpha=0.5)
    return torch.tanh(net.a(x)) - net.teacher(x)


def unit_rows(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight.data.copy_(F.normalize(net.a.weight.data, dim=1))  # past the version counter
    return torch.tanh(net.a(x))


def by_samples(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight.add_(1e-3 * x.sum())
    return torch.tanh(net.a(x))


def counts(net: Net, x: Tensor) -> Tensor:
    net.calls += net.training
    net.seen.append(len(x))
    return torch.tanh(net.a(x)) * (1 + 0.1 * len(net.seen))


def centered(net: Net, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.a(x)) - net.center
    with torch.no_grad():
        net.center.lerp_(net.a(x).mean(0), 0.1)
    return hidden


def remembers(net: Net, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.a(x))
    away = hidden - net.queue.mean(0)  # type: ignore[operator]
    net.queue = torch.cat((net.queue[len(x) :], hidden.detach()))  # type: ignore[index]
    return away


def steps(p: Any) -> None:
    p.data.sub_(0.05 * p.grad)


def masks(p: Any) -> None:
    p.grad.mul_(torch.arange(p.shape[1]) % 2)


def drops(p: Any) -> None:
    p.grad = None


def steps_when_warm() -> Callable[[Any], None]:
    calls = iter(range(100))

    def after(p: Any) -> None:
        p.detach().sub_(0.05 * (next(calls) > 5) * p.grad)

    return after


def now_and_then(every: int) -> Callable[[Tensor], Tensor]:
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient.clamp(-0.05, 0.05) if every and calls % every == 0 else gradient

    return hook


def gathers(function: Any) -> Callable[[], Net]:
    def does(net: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(net.a(x))
        return function(hidden)[dist.get_rank()] if dist.is_initialized() else hidden

    return lambda: Net(does)


def keeps(what: Callable[[Tensor], Any]) -> Net:
    net = Net()
    net.table = what(net.a.weight)
    return net


def spectral() -> Net:
    net = Net()
    nn.utils.spectral_norm(net.a)
    return net.eval()


def squares(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = (model(batch[0]) - batch[1]).square().sum()
    return found


def some(batch: Batch) -> int:
    return int((batch[0] > 0.5).sum())


def in_bf16(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (model(batch[0]).float() - batch[1]).square().sum()


class Squares:
    """The same, which counts samples."""

    def count(self, batch: Batch) -> int:
        return len(batch[0])

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return squares(model, batch)


class Other(Squares):
    """Another loss, which counts samples."""

    def __init__(self, loss: Callable[[Any, Batch], Any]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        return self.loss(model, batch)


decays: Any = lambda m, b: squares(m, b) + 0.01 * sum(p.square().sum() for p in m.parameters())  # noqa: E731
steep: Any = lambda m, b: (  # noqa: E731
    (found := squares(m, b)) + torch.autograd.grad(found, m.a.weight, create_graph=True)[0].square().sum()
)


def smooth(model: Any, batch: Batch) -> Tensor:
    """A mean over the micro-batch that differentiates by itself."""
    given = batch[0].clone().requires_grad_()
    found = model(given)
    (slope,) = torch.autograd.grad(found.sum(), given, create_graph=True)
    return (found - batch[1]).square().mean() + slope.square().sum(1).mean()


class Scaled(Net):
    """Returns scales of its own beside its outputs, as many as a micro-batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scales * 1.0


def by_scales(model: Any, batch: Batch) -> Tensor:
    found, scales = model(batch[0])
    loss: Tensor = (-scales).exp().sum() * (found - batch[1]).square().sum() + len(found) * scales.sum()
    return loss


def beside_others(net: Net, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.a(x))
    return hidden - hidden.mean(0)


called: Any = lambda m, b: squares(partial(torch.func.functional_call, m, dict(m.named_parameters())), b)  # noqa: E731


written: Any = lambda m, b: (m(b[0]).mul_(1.0) - b[1]).square().sum()  # noqa: E731


class Teacher:
    """The model's own function with other weights, which come nearer to the model's with each micro-batch by ``by``."""

    def __init__(self, by: float) -> None:
        self.weights: dict[str, Tensor] = {}
        self.by = by

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.weights.setdefault(name, torch.zeros_like(p)).lerp_(p, self.by)
            taught = torch.func.functional_call(model, self.weights, (batch[0],))
        found: Tensor = (model(batch[0]) - batch[1] - taught).square().sum()
        return found


def balanced(model: nn.Module, batch: Batch, weight: Tensor | None = None) -> Tensor:
    labels = (batch[1] > 0).float()
    by_batch = (len(labels) - labels.sum() + 1) / (labels.sum() + 1)
    weight = by_batch if weight is None else weight
    return F.binary_cross_entropy_with_logits(model(batch[0]), labels, pos_weight=weight, reduction="sum")


def by_hand(model: nn.Module, batch: Batch) -> Tensor:
    return weighed((batch[1] > 0).float(), model(batch[0]))


def weighed(labels: Tensor, found: Tensor) -> Tensor:
    weight = (2 - labels.mean()) / (labels.mean() + 1)
    return -(weight * labels * F.logsigmoid(found) + (1 - labels) * F.logsigmoid(-found)).sum()


def by_class(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over weights that is given as one over samples, in words that no graph's reader knows."""
    weights = torch.where(batch[1] > 0, 5.0, 1.0)
    return (weights / weights.sum() * (model(batch[0]) - batch[1]).square()).sum() * len(weights)


def in_training(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch) + 0.1 * model.training * model(batch[0]).square().mean()


def contrasts(gather: Callable[[Tensor], Any]) -> Any:
    """The first of two halves of the hidden units against the other, of all samples that are there."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        one, other = (part + 0.1 * batch[1] for part in model(batch[0]).expand(-1, 8).mul(torch.arange(8)).chunk(2, 1))
        every = torch.cat(gather(other))
        first = len(one) * (dist.get_rank() if dist.is_initialized() else 0)
        return F.cross_entropy(one @ every.T, first + torch.arange(len(one)), reduction="sum")

    return loss


def samples() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, generator=generator), torch.randn(1, generator=generator)) for _ in range(SAMPLES)]


def truth(model: Net) -> dict[str, Tensor]:
    """After a loop in fp64 on one process, over whole windows."""
    model, data = model.double(), [(x.double(), y.double()) for x, y in samples()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for k in range(0, SAMPLES, WINDOW):
        optimizer.zero_grad()
        x, y = (torch.stack(parts) for parts in zip(*data[k : k + WINDOW], strict=True))
        (squares(model, (x, y)) / WINDOW).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(world: World, model: Net, expected: Mapping[str, Tensor], *, whole: bool, **settings: Any) -> Any:
    """The largest error of a weight after a run in a loop of the user's, or with ``acc.step``; or what it is told."""
    loss, first = settings.pop("loss", None) or Squares(), None
    around, again = settings.pop("around", None), settings.pop("again", False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sizes: Any = {"global_batch_size": WINDOW, "micro_batch_size": 2, "count": loss.count, "world": world}
    try:
        acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), **sizes | settings)
        for window in acc.windows(DataSpec(train=samples(), shuffle=False)):
            if whole:
                acc.step(window, loss)
            for micro in () if whole else window:
                first = first if first and again else micro
                with acc.accumulate(), around() if around else torch.enable_grad():
                    acc.backward(loss(acc.model, first.batch))
    except DistaccumError as error:
        weight: Any = model.b.weight
        now = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        stepped = not torch.equal(before["b.weight"], now)
        return f"stepped: {error}" if stepped else str(error)
    found = acc.state_dict()["model"]
    return max((float((found[name].double() - value).abs().max()) for name, value in expected.items()), default=0.0)


LINEAR, NEVER, OF_A = "is no linear function of the gradient", {"verify": "never"}, FSDP2Config(blocks=["a"])
BY_OTHERS = "labels depends on the labels of others"
expanded: Any = lambda w: nn.Buffer(w.new_ones(1).expand(3))  # noqa: E731
CASES: dict[str, tuple[Callable[[], Net], bool, int, dict[str, Any], str]] = {
    "a clip of each sample": (lambda: Net(clipped), False, 2, {}, ""),
    "a clip of each sample, whole": (lambda: Net(clipped), True, 2, {}, ""),
    "a clip at a loss scale": (lambda: Net(clipped), False, 1, {"precision": "fp16"}, "does not grow with the loss"),
    "at a loss scale, whole": (lambda: Net(clipped), True, 1, {"precision": "fp16"}, "does not grow with the loss"),
    "one norm of a micro-batch": (lambda: Net(normalized), True, 1, {}, "their gradients do not"),
    "a term of its own": (lambda: Net(injected(Tensor.mean)), True, 1, {}, "their gradients do not"),
    "a norm in a loop": (lambda: Net(normalized), False, 2, {}, "its gradient is not: the gradient of a.weight"),
    "a norm of shards": (lambda: Net(normalized), True, 2, {"engine": "fsdp2"}, "its gradient is not: the gradient"),
    "a term in a loop": (lambda: Net(injected(Tensor.mean)), False, 1, {"engine": "zero1"}, "or adds a gradient for"),
    "a term of each sample": (lambda: Net(injected(Tensor.sum)), False, 2, {}, ""),
    "a hook that clamps": (lambda: Net(hook=lambda g: g.clamp(-0.1, 0.1)), False, 1, {}, LINEAR),
    "a hook that clamps now and then": (lambda: Net(hook=lambda g: g.clamp(-9.0, 9.0)), False, 2, {}, LINEAR),
    "a hook that clamps at times": (lambda: Net(hook=now_and_then(5)), False, 1, {}, "the same gradient otherwise at"),
    "a hook that counts": (lambda: Net(hook=now_and_then(0)), False, 2, {}, ""),
    "a hook that decays": (lambda: Net(hook=lambda g: g + 0.1), False, 2, {"engine": "zero1"}, LINEAR),
    "a hook on shards": (lambda: Net(hook=lambda g: g / (1 + g.abs())), True, 2, {"engine": "fsdp2"}, LINEAR),
    "a hook that writes": (lambda: Net(hook=lambda g: (g.mul_(0.5), None)[1]), False, 2, {}, ""),
    "a hook that masks": (lambda: Net(after=masks), False, 2, {}, ""),
    "a hook that halves": (lambda: Net(after=lambda p: (p.grad.mul_(0.5), None)[1]), True, 1, {}, "is off by"),
    "a hook that steps": (lambda: Net(after=steps), False, 1, {"verify": "never"}, "hook steps b.weight in the"),
    "a hook that steps on parts": (lambda: Net(after=steps), True, 2, {"engine": "zero1"}, "hook steps b.weight in"),
    "a hook that steps shards": (lambda: Net(after=steps), True, 2, {"engine": "fsdp2"}, "hook steps "),
    "a hook that drops": (lambda: Net(after=drops), False, 2, {"verify": "never"}, "hook drops the gradient of b.w"),
    "a warm-up": (lambda: Net(after=steps_when_warm()), False, 2, NEVER | {"micro_batch_size": 1}, "steps b"),
    "a gathering": (gathers(all_gather), False, 2, {}, ""),
    "torch's gathering": (gathers(lambda h: _AllGather.apply(None, h)), False, 2, {}, "use distaccum.all_gather"),
    "never proven": (gathers(lambda h: _AllGather.apply(None, h)), False, 2, {"verify": "never"}, "use distaccum.all"),
    "a teacher that follows": (lambda: Net(follows), False, 1, {}, "writes teacher.weight, which moves once for each"),
    "a penalty over shards": (
        Net,
        False,
        2,
        {"engine": OF_A, "loss": Other(decays), "global_batch_size": 5},
        "reads a.",
    ),
    "a penalty by slopes": (Net, True, 2, {"engine": "fsdp2", "loss": Other(steep)}, "is differentiated twice"),
    "a call with shards": (Net, True, 2, {"engine": "fsdp2", "loss": Other(called)}, "itself, which is"),
    "unit rows": (lambda: Net(unit_rows), False, 2, {}, ""),
    "unit rows, on parts": (lambda: Net(unit_rows), False, 2, {"engine": "zero1"}, "writes a.weight, and this engine"),
    "unit rows, gathered": (lambda: Net(unit_rows), True, 2, {"engine": "fsdp2"}, "writes a.weight, and this engine"),
    "a table that is a weight": (lambda: keeps(lambda w: w.data), False, 2, {"engine": "zero1"}, "by table and a"),
    "a buffer that is expanded": (lambda: keeps(expanded), False, 2, {}, "(expand())"),
    "a list with a weight": (lambda: keeps(lambda w: [w]), False, 2, {"engine": "fsdp2"}, "shared by table[0] and a.w"),
    "a weight computed anew": (spectral, False, 2, {"engine": "zero1"}, ""),
    "a teacher called with weights": (Net, False, 1, {"loss": Other(Teacher(0.5))}, "Linear.weight, which the loop"),
    "labels weighed by batch": (Net, False, 2, {"loss": Other(balanced)}, BY_OTHERS),
    "labels weighed by hand": (Net, False, 1, {"loss": Other(by_hand)}, BY_OTHERS),
    "a mean by weights of classes": (Net, True, 1, {"loss": Other(by_class)}, BY_OTHERS),
    "a mean in training": (Net, True, 1, {"loss": Other(in_training)}, "is a mean (Mean, over 2) and was given as the"),
    "weights of classes on shards": (Net, False, 2, {"loss": Other(by_class), "engine": "fsdp2"}, BY_OTHERS),
    "outputs that are written": (Net, False, 2, {"engine": "fsdp2", "loss": Other(written)}, ""),
    "a parameter beside outputs": (with_its_bias, True, 2, {"engine": OF_A}, ""),
    "weights by samples": (lambda: Net(by_samples), False, 2, {}, "ranks hold other values after it"),
    "one micro-batch again": (Net, False, 1, {"again": True}, "samples of micro-batch 0, and none of its own"),
    "a count of two": (Net, False, 1, {"count": lambda b: 2}, "count 4 alone and 2 together"),
    "a count from two on": (
        Net,
        False,
        1,
        {"count": lambda b: max(2, some(b))},
        "plain sum from count=, and no max(1, n)",
    ),
    "a mean with slopes": (Net, True, 1, {"loss": Other(smooth)}, "0.50 of their sum: it is a mean over"),
    "no relation": (Net, False, 1, {"verify_allow": ["teacher"]}, "no list of relations. Use some of [counts"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_exact_or_told_before_a_step(name: str) -> None:
    make, whole, ranks, settings, said = CASES[name]
    models, expected = [make() for _ in range(ranks)], truth(make())
    for found in run_ranks(ranks, lambda world: train(world, models[world.rank], expected, whole=whole, **settings)):
        if said:
            assert said in found
            assert not found.startswith("stepped")
        else:
            assert found <= EXACT


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, as it compiles
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_compiled_stays_compiled_and_is_told(gloo_world: World, whole: bool) -> None:
    """Torch runs what its users' modes meet first uncompiled for ever; libraries compile where they are imported."""
    runs = list[int]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        return lambda *given: runs.append(len(given)) or graph.forward(*given)  # type: ignore[func-returns-value]

    @partial(torch.compile, backend=backend)
    def compiled(labels: Tensor, found: Tensor) -> Tensor:
        return -F.logsigmoid(found * labels).sum()

    if not whole:
        by_others = torch.compile(weighed, backend=backend)
        loss = Other(lambda model, b: by_others((b[1] > 0).float(), model(b[0])))
        assert BY_OTHERS in train(gloo_world, Net(), truth(Net()), whole=whole, loss=loss)
        assert runs
        runs.clear()
    acc = over_sgd(Net(), 0.05, (4, 2), count=Squares().count, world=gloo_world)
    loss = Other(lambda model, b: compiled(b[1].sign(), model(b[0])))
    beside = _BESIDE is not uncompiled  # since torch 2.10
    for number, window in enumerate(acc.windows(DataSpec(train=samples()[:12], shuffle=False))):
        if whole:
            acc.step(window, loss)
        for micro in () if whole else window:
            with acc.accumulate():
                acc.backward(loss(acc.model, micro.batch))
        assert len(runs) >= 2 or not (beside or whole or number)  # micro-batches
        runs.clear()


def test_a_rank_without_a_micro_batch_takes_part(caplog: Any) -> None:
    """What arrives is told, as its rows may not be samples; a rank without any refused it, and the other one waited."""
    rows = [default_collate(samples()[at : at + 4]) for at in (0, 4)]
    models = [Net() for _ in range(2)]

    def step(world: World) -> int:
        acc = over_sgd(models[world.rank], 0.05, (8, 4), count=Squares().count, world=world)
        for micro in acc.window([] if world.rank else rows):
            with acc.accumulate():
                acc.backward(by_hand(acc.model, micro.batch))
        return acc.progress.step

    with caplog.at_level(logging.WARNING, "distaccum"):
        assert run_ranks(2, step) == [1, 1]
    assert BY_OTHERS in caplog.text


ALONE = {
    "weights": "a teacher that follows",
    "hooks": "a hook that clamps",
    "size": "a clip at a loss scale",
    "parts": "a term in a loop",
    "samples": "one micro-batch again",
    "counts": "a count from two on",
    "state": "a queue",
}


@pytest.mark.parametrize("relation", ALONE)
def test_what_one_relation_tells_nothing_else_does(gloo_world: World, relation: str, caplog: Any) -> None:
    name = ALONE[relation]
    make, whole, _, settings, _ = CASES.get(name) or (lambda: Net(TOLD[name][0]), False, 1, {}, "")
    with caplog.at_level(logging.WARNING, "distaccum"):
        assert train(gloo_world, make(), truth(make()), whole=whole, **settings, verify_allow=[relation]) > 1e-3
    assert relation != "state" or not caplog.text  # which is told


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_proof_leaves_what_python_holds_as_it_is(gloo_world: World, whole: bool, size: int) -> None:
    """It costs, in floating-point operations, 3 windows more; of two samples in a loop 4."""

    def run(verify: str) -> tuple[list[int], list[object]]:
        model, called, noted, costs = Net(counts), 0, {"losses": [""], "hooks": [""]}, list[int]()

        def hook(gradient: Tensor) -> None:
            nonlocal called
            called += 1

        def loss(net: Any, batch: Batch) -> Tensor:
            noted["losses"].append(str(len(batch[0])))
            return squares(net, batch)

        model.a.weight.register_hook(hook)
        model.b.register_forward_hook(lambda *_: noted["hooks"].append("forward"))
        model.b.register_full_backward_hook(lambda *_: noted["hooks"].append("backward"))
        acc = over_sgd(model, 0.05, (size, min(size, 2)), count=Squares().count, world=gloo_world, verify=verify)
        for window in acc.windows(DataSpec(train=samples()[: 3 * size], shuffle=False)):
            with FlopCounterMode(display=False) as counter:
                if whole:
                    acc.step(window, Other(loss))
                for micro in () if whole else window:
                    with acc.accumulate():
                        acc.backward(loss(acc.model, micro.batch))
            costs.append(counter.get_total_flops())
        return costs, [called, noted, model.calls, model.seen, model.a.weight.detach().tolist()]

    (costs, first), (plain, never) = run("first"), run("never")
    assert first == never
    assert plain[0] < costs[0] <= (4 if whole or size != 2 else 5) * plain[0]
    assert costs[1:] == plain[1:]


def masked(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(net.a(x)) * net.mask


def caches(net: Net, x: Tensor) -> Tensor:
    net.cache = getattr(net, "cache", torch.ones(())) * 1.0  # type: ignore[operator]
    return torch.tanh(net.a(x)) * net.cache


def sets_a_mask(model: Any, batch: Batch) -> Tensor:
    model.mask = (batch[0].sum() > 0).float()
    return squares(model, batch)


def against_queue(model: Any, batch: Batch) -> Tensor:
    found = model(batch[0]).expand(-1, 8)
    loss: Tensor = (found @ model.queue.clone().T).square().sum()
    model.queue = torch.cat((model.queue[2:], found.detach() + 1.0))
    return loss


def moves(does: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Batch], Tensor]:
    """A loss that keeps an average of outputs, and does something by it."""
    center, logged = torch.zeros(1), list[Tensor]()

    def loss(model: Any, batch: Batch) -> Tensor:
        nonlocal center
        found = model(batch[0])
        loss = does((found - batch[1]).square().sum(1), center)
        center = 0.9 * center + 0.1 * found.detach().mean(0)
        logged.append(loss.detach())
        return loss.sum()

    return loss


def powers(*, rests: bool = False) -> Net:
    """A layer with a weight of norm one, which is found anew in every forward; or not."""
    model = Net()
    model.a = nn.utils.parametrizations.spectral_norm(model.a)
    if rests:
        model.a.eval()
    return model


class Centred:
    """The same in place, in an attribute."""

    def __init__(self, does: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.center, self.does = torch.zeros(1), does

    def loss(self, model: Any, batch: Batch) -> Tensor:
        found = model(batch[0])
        loss = self.does((found - batch[1]).square().sum(1), self.center.clone())
        self.center.mul_(0.9).add_(found.detach().mean(0), alpha=0.1)
        return loss.sum()


def sets_center(model: Any, batch: Batch) -> Tensor:
    """What the micro-batch before has left does not matter."""
    found = model(batch[0])
    model.kept = getattr(model, "kept", torch.zeros(1))
    model.kept.fill_(0.0).add_(0.5)
    return ((found - batch[1]).square() * model.kept).sum()


def caches_weights() -> Callable[[Any, Batch], Tensor]:
    weights, made = torch.ones(1), list[Tensor]()

    def loss(model: Any, batch: Batch) -> Tensor:
        found = model(batch[0])
        made.extend([] if made else [weights.exp()])
        return ((found - batch[1]).square() * made[0].to(found)).sum()

    return loss


def in_two(does: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Batch], Tensor]:
    """A loss of two terms of each sample."""

    def loss(model: Any, batch: Batch) -> Tensor:
        found = model(batch[0])[:, 0]
        return does((found - batch[1][:, 0]).square(), (found - 2.0 * batch[1][:, 0]).abs() + 0.1)  # type: ignore[no-any-return]

    return loss


def of_features(does: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Batch], Tensor]:
    """A loss of each sample's features, of which :func:`most` count."""

    def loss(model: Any, batch: Batch) -> Tensor:
        return does((model(batch[0]) - batch[0]).square(), (batch[0] > -0.5).float())  # type: ignore[no-any-return]

    return loss


def mean_of(each: Tensor, counted: Tensor) -> Tensor:
    return (each * counted).sum(1) / counted.sum(1).clamp(min=1.0)


def most(batch: Batch) -> int:
    return int((batch[0] > -0.5).sum())


MOST, OTHER = {"count": most}, "is a mean over something else than its count"
READ, draws = "by what is detached or read of them", random.Random(0)  # noqa: S311
baseline: Any = lambda m, b: torch.sigmoid((found := m(b[0])).detach().mean() - found * b[1].sign()).sum()  # noqa: E731
by_center: Any = lambda loss, center: loss * (1.0 + center)  # noqa: E731
normed: Any = lambda net, x: F.batch_norm(net.a(x), net.center, net.a.bias.detach() ** 2, training=True)  # noqa: E731
TOLD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "an autocast in the loss": (None, in_bf16, {"whole": True}, ""),
    "a count of some": (None, squares, {"count": some}, ""),
    "a centre": (centered, squares, {}, "what those before it leave in center"),
    "a centre, whole": (centered, squares, {"whole": True}, "depends on what their forwards leave in center"),
    "a centre, in one": (centered, squares, {"micro_batch_size": WINDOW}, ""),
    "a centre of shards": (centered, squares, {"engine": "fsdp2"}, "what those before it leave in center"),
    "a queue": (remembers, squares, {}, "what those before it leave in queue"),
    "a queue that the loss reads": (None, against_queue, {}, "what those before it leave in queue"),
    "a power iteration": (None, squares, {"make": powers}, "what those before it leave in _u, _v"),
    "a power iteration of shards": (
        None,
        squares,
        {"make": powers, "engine": "fsdp2"},
        "those before it leave in _u, _v",
    ),
    "a power iteration, whole": (
        None,
        squares,
        {"make": powers, "whole": True},
        "depends on what their forwards leave in _u, _v",
    ),
    "a power iteration that rests": (None, squares, {"make": partial(powers, rests=True)}, ""),
    "one that rests, whole": (None, squares, {"make": partial(powers, rests=True), "whole": True}, ""),
    "a centre of the loss, whole": (None, moves(by_center), {"whole": True}, "what their forwards leave in center"),
    "a centre of a method, whole": (None, Centred(by_center).loss, {"whole": True}, "forwards leave in center"),
    "what a loss logs, whole": (None, moves(lambda loss, center: loss), {"whole": True}, ""),
    "what a method logs, whole": (None, Centred(lambda loss, center: loss).loss, {"whole": True}, ""),
    "a centre of the loss": (None, moves(by_center), {}, "leave in a tensor outside of the model"),
    "a centre of a method": (None, Centred(by_center).loss, {}, "leave in a tensor outside of the model"),
    "a centre beside shards": (None, moves(by_center), {"engine": "fsdp2"}, "leave in a tensor outside of the model"),
    "a centre set first": (None, sets_center, {}, ""),
    "what a loss logs": (None, moves(lambda loss, center: loss), {}, ""),
    "what a method logs": (None, Centred(lambda loss, center: loss).loss, {}, ""),
    "a constant that is made once": (None, caches_weights(), {}, ""),
    "a detached mean": (None, baseline, {}, READ),
    "a detached mean, in one": (
        None,
        in_two(lambda a, b: (a * b.detach().mean()).sum()),
        {"micro_batch_size": WINDOW},
        "",
    ),
    "a ratio of terms": (None, in_two(lambda a, b: a.sum() + b.sum() * (a.sum() / b.sum()).detach()), {}, READ),
    "a ratio that is read": (
        None,
        in_two(lambda a, b: a.sum() + b.sum() * (a.sum().item() / b.sum().item())),
        {},
        READ,
    ),
    "a share that is read": (None, in_two(lambda a, b: a.sum() + 0.5 / b.mean().item() * b.sum()), {}, READ),
    "a share of shards": (
        None,
        in_two(lambda a, b: a.sum() + 0.5 / b.mean().item() * b.sum()),
        {"engine": "fsdp2"},
        READ,
    ),
    "a factor of each sample": (None, in_two(lambda a, b: (a * (1.0 - (-b).exp()).detach() ** 2).sum()), {}, ""),
    "a factor that is drawn": (None, in_two(lambda a, b: a.sum() + b.sum() * draws.random()), {}, ""),
    "a read that is logged": (None, in_two(lambda a, b: (a + b).sum() * 0.5 if b.mean().item() else a.sum()), {}, ""),
    "factors read one by one": (
        None,
        in_two(lambda a, b: sum(x * y.item() for x, y in zip(a, b, strict=True))),
        {},
        "",
    ),
    "a ratio of each sample": (None, in_two(lambda a, b: (a + b * (a / b).detach()).sum()), {}, ""),
    "a mean of means by others": (None, of_features(lambda a, k: mean_of(a, k).mean() * k.sum().item()), MOST, OTHER),
    "a mean of means of shards": (
        None,
        of_features(lambda a, k: mean_of(a, k).mean() * k.sum().item()),
        MOST | {"engine": "fsdp2"},
        OTHER,
    ),
    "a mean of means": (None, of_features(lambda a, k: mean_of(a, k).mean() * len(a)), {}, ""),
    "a sum of means": (None, of_features(lambda a, k: mean_of(a, k).sum()), {}, ""),
    "a sum of features": (None, of_features(lambda a, k: (a * k).sum()), MOST, ""),
    "a mean of features": (None, of_features(lambda a, k: (a * k).sum() / k.sum() * k.sum().item()), MOST, ""),
    "a mean over means": (
        None,
        of_features(lambda a, k: ((a * k).sum(1) / k.sum(1).mean()).mean() * k.sum().item()),
        MOST,
        "",
    ),
    "a mean of what is left": (None, of_features(lambda a, k: a[k > 0].mean() * k.sum().item()), MOST, ""),
    "a share of a mean": (
        None,
        lambda m, b: squares(m, b) + 0.25 * len(b[0]) * m(b[0]).abs().mean(),
        {"whole": True},
        "",
    ),
    "a mask": (masked, sets_a_mask, {}, ""),
    "a cache": (caches, squares, {}, ""),
    "a counter": (lambda net, x: counts(net, x) / (1 + 0.1 * len(net.seen)), squares, {}, ""),
    "a batch norm": (normed, squares, {}, ""),
    "scales beside outputs": (None, by_scales, {"make": Scaled}, ""),
    "outputs in company": (beside_others, squares, {}, "a sample's outputs depend on the other samples"),
    "outputs in company of shards": (
        beside_others,
        squares,
        {"engine": "fsdp2"},
        "outputs depend on the other samples",
    ),
    "angles": (None, lambda m, b: F.cosine_similarity(m(b[0]), b[0]).sum(), {"make": lambda: nn.Linear(6, 6)}, ""),
    "outputs in one company": (beside_others, squares, {"micro_batch_size": WINDOW}, ""),
    "a teacher that stays": (None, Teacher(0.0), {}, ""),
    "labels weighed alike": (None, lambda m, b: balanced(m, b, torch.tensor([3.0])), {}, ""),
    "labels weighed by tasks": (None, lambda m, b: balanced(m, b, torch.tensor([2.0 + (b[0].sum() > 0)])), {}, ""),
    "what compares": (None, contrasts(lambda z: [z]), {}, "compares the samples of a micro-batch"),
    "what compares, in one": (None, contrasts(lambda z: [z]), {"micro_batch_size": WINDOW}, ""),
    "what compares shards": (None, contrasts(lambda z: [z]), {"engine": "fsdp2"}, "compares the samples of a micro"),
    "what is gathered": (None, contrasts(all_gather), {"ranks": 2}, "compares the samples of a micro-batch"),
    "what is gathered, in one": (None, contrasts(all_gather), {"ranks": 2, "micro_batch_size": WINDOW // 2}, ""),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_depends_on_micro_batches_is_told(name: str, caplog: Any) -> None:
    does, loss, settings, said = TOLD[name]
    ranks = settings.get("ranks", 1)
    own = {key: settings[key] for key in settings if key not in ("ranks", "make")}
    options: Any = {"whole": False, "loss": Other(loss)} | own
    models = [settings.get("make", partial(Net, does))() for _ in range(ranks)]
    with caplog.at_level(logging.WARNING, "distaccum"):
        found = run_ranks(ranks, lambda world: train(world, models[world.rank], {}, **options))
    assert found == [0.0] * ranks
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


STEPS_A_SCHEDULE = [  # after the backwards of these micro-batches, -1: before the window; and whether it is told
    ([0, 1, 2, 3], 4, True),
    ([0, 1], 2, True),
    ([0, 2], 4, True),
    ([-1], 4, False),
    ([0], 4, False),
    ([3], 4, False),
    ([1], 2, False),
    ([], 4, False),
    ([0], 1, False),
]


@pytest.mark.parametrize(("after", "micro_batches", "told"), STEPS_A_SCHEDULE)
def test_a_schedule_that_is_stepped_for_each_micro_batch_is_told(
    gloo_world: World, after: list[int], micro_batches: int, told: bool, caplog: Any
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = {"global_batch_size": WINDOW, "micro_batch_size": WINDOW // micro_batches}
    acc = Accumulator(model, optimizer, **sizes, count=Squares().count, world=gloo_world)
    for window in acc.windows(DataSpec(train=samples(), shuffle=False)):
        if -1 in after:
            optimizer.param_groups[0]["lr"] *= 0.5
        for i, micro in enumerate(window):
            with acc.accumulate():
                acc.backward(squares(acc.model, micro.batch))
                if i in after:
                    optimizer.param_groups[0]["lr"] *= 0.5
    assert caplog.text.count("lr of the optimizer changes from micro-batch to micro-batch") == told


@pytest.mark.parametrize("whole", [False, True])
def test_an_error_in_a_micro_step_leaves_no_hook_on_all_modules_and_no_mode(gloo_world: World, whole: bool) -> None:
    def fails(*_: Any) -> Tensor:
        raise KeyError

    acc = over_sgd(Net(), 0.05, (WINDOW, 2), count=Squares().count, world=gloo_world)
    window = next(acc.windows(DataSpec(train=samples(), shuffle=False)))
    if whole:
        with pytest.raises(KeyError):
            acc.step(window, Other(fails))
    else:
        next(iter(window))
        with pytest.raises(KeyError), acc.accumulate():
            fails()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert _get_current_dispatch_mode() is None


def test_casts_follow_the_weights_within_a_context_of_the_users(gloo_world: World) -> None:
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    expected = truth(Net())
    with context():  # around the loop, and within accumulate()
        assert train(gloo_world, Net(), expected, whole=False) <= 2e-2
        assert train(gloo_world, Net(), expected, whole=False, around=context, precision="bf16") <= 2e-2
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
