"""What holds in every right program: programs that break a relation are told before a step, others train exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import _AllGather

from distaccum import Accumulator, DataSpec, DistaccumError, FSDP2Config, World, all_gather
from distaccum.errors import VerificationError
from tests.support.threads import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")  # of fp16 on a CPU
EXACT, SAMPLES, WINDOW = 5e-6, 24, 8
Batch = tuple[Tensor, Tensor]


class Aux(torch.autograd.Function):
    """A term whose gradient is one whatever the loss is, as some mixtures of experts have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones(())


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
        self.does = does
        if hook is not None:
            self.a.weight.register_hook(hook)
        for p in (self.a.weight, self.b.weight) if after is not None else ():
            p.register_post_accumulate_grad_hook(after)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x)) if self.does is None else self.does(self, x)
        return self.b(hidden)


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
    return lambda net, x: Aux.apply(h := torch.tanh(net.a(x)), over(h.square()))  # type: ignore[no-untyped-call]


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
called: Any = lambda m, b: squares(partial(torch.func.functional_call, m, dict(m.named_parameters())), b)  # noqa: E731


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
    return max(float((found[name].double() - value).abs().max()) for name, value in expected.items())


LINEAR = "is no linear function of the gradient"
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
    "a hook that decays": (lambda: Net(hook=lambda g: g + 0.1), False, 2, {"engine": "zero1"}, LINEAR),
    "a hook on shards": (lambda: Net(hook=lambda g: g / (1 + g.abs())), True, 2, {"engine": "fsdp2"}, LINEAR),
    "a hook that writes": (lambda: Net(hook=lambda g: (g.mul_(0.5), None)[1]), False, 2, {}, ""),
    "a hook that masks": (lambda: Net(after=masks), False, 2, {}, ""),
    "a hook that halves": (lambda: Net(after=lambda p: (p.grad.mul_(0.5), None)[1]), True, 1, {}, "is off by"),
    "a hook that steps": (lambda: Net(after=steps), False, 1, {"verify": "never"}, "hook steps b.weight in the"),
    "a hook that steps on parts": (lambda: Net(after=steps), True, 2, {"engine": "zero1"}, "hook steps b.weight in"),
    "a hook that steps shards": (lambda: Net(after=steps), True, 2, {"engine": "fsdp2"}, "hook steps "),
    "a hook that drops": (lambda: Net(after=drops), False, 2, {"verify": "never"}, "hook drops the gradient of b.w"),
    "a warm-up": (
        lambda: Net(after=steps_when_warm()),
        False,
        2,
        {"verify": "never", "micro_batch_size": 1},
        "steps b",
    ),
    "a gathering": (gathers(all_gather), False, 2, {}, ""),
    "torch's gathering": (gathers(lambda h: _AllGather.apply(None, h)), False, 2, {}, "use distaccum.all_gather"),
    "never proven": (gathers(lambda h: _AllGather.apply(None, h)), False, 2, {"verify": "never"}, "use distaccum.all"),
    "a teacher that follows": (lambda: Net(follows), False, 1, {}, "writes teacher.weight, which moves once for each"),
    "a penalty over shards": (
        Net,
        False,
        2,
        {"engine": FSDP2Config(blocks=["a"]), "loss": Other(decays), "global_batch_size": 5},
        "reads a.",
    ),
    "a penalty by slopes": (Net, True, 2, {"engine": "fsdp2", "loss": Other(steep)}, "is differentiated twice"),
    "a call with shards": (Net, True, 2, {"engine": "fsdp2", "loss": Other(called)}, "itself, which is"),
    "unit rows": (lambda: Net(unit_rows), False, 2, {}, ""),
    "unit rows, on parts": (lambda: Net(unit_rows), False, 2, {"engine": "zero1"}, "writes a.weight, and this engine"),
    "unit rows, gathered": (lambda: Net(unit_rows), True, 2, {"engine": "fsdp2"}, "writes a.weight, and this engine"),
    "a table that is a weight": (
        lambda: keeps(lambda w: w.data),
        False,
        2,
        {"engine": "zero1"},
        "shared by table and a",
    ),
    "a buffer that is expanded": (
        lambda: keeps(lambda w: nn.Buffer(w.new_ones(1).expand(3))),
        False,
        2,
        {},
        "(expand())",
    ),
    "a list with a weight": (lambda: keeps(lambda w: [w]), False, 2, {"engine": "fsdp2"}, "shared by table[0] and a.w"),
    "a weight computed anew": (spectral, False, 2, {"engine": "zero1"}, ""),
    "weights by samples": (lambda: Net(by_samples), False, 2, {}, "ranks hold other values after it"),
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


ALONE = {
    "weights": "a teacher that follows",
    "hooks": "a hook that clamps",
    "size": "a clip at a loss scale",
    "parts": "a term in a loop",
}


@pytest.mark.parametrize("relation", ALONE)
def test_what_one_relation_tells_nothing_else_does(gloo_world: World, relation: str) -> None:
    make, whole, _, settings, _ = CASES[ALONE[relation]]
    assert train(gloo_world, make(), truth(make()), whole=whole, **settings, verify_allow=[relation]) > 1e-3


def test_a_proof_leaves_what_python_holds_as_it_is(gloo_world: World) -> None:
    def run(verify: str) -> tuple[int, list[int], Tensor]:
        model, loss = Net(counts), Squares()
        sizes: Any = {"global_batch_size": WINDOW, "micro_batch_size": WINDOW, "count": loss.count}
        acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), **sizes, world=gloo_world, verify=verify)
        for window in acc.windows(DataSpec(train=samples(), shuffle=False)):
            acc.step(window, loss)
        return model.calls, model.seen, model.a.weight.detach()

    (calls, seen, weight), (as_many, alike, same) = run("first"), run("never")
    assert (calls, seen) == (as_many, alike) == (3, [WINDOW] * 3)
    assert torch.equal(weight, same)


@pytest.mark.parametrize("micro", [2, WINDOW])
def test_what_forwards_leave_to_the_next_is_told(gloo_world: World, caplog: Any, micro: int) -> None:
    loss = Squares()
    with caplog.at_level(logging.WARNING, "distaccum"):
        sizes: Any = {"global_batch_size": WINDOW, "micro_batch_size": micro, "count": loss.count, "world": gloo_world}
        acc = Accumulator(model := Net(centered), torch.optim.SGD(model.parameters(), lr=0.05), **sizes)
        acc.step(next(acc.windows(DataSpec(train=samples(), shuffle=False))), loss)
    assert ("depends on what their forwards leave in center" in caplog.text) == (micro < WINDOW)


def test_a_loop_that_trains_one_micro_batch_again_is_told(gloo_world: World) -> None:
    said = train(gloo_world, Net(), {}, whole=False, again=True)
    assert said.startswith("micro-step 1 gives the model the samples of micro-batch 0, and none of its own")
    assert train(gloo_world, Net(), truth(Net()), whole=False, again=True, verify_allow=["samples"]) > 1e-3


def test_a_relation_that_is_broken_on_purpose_is_left_out(gloo_world: World) -> None:
    said = train(gloo_world, Net(), {}, whole=False, verify_allow=["teacher"])
    assert "verify_allow=['teacher']: no list of relations. Use some of [counts" in said


def test_an_autocast_in_the_loss_is_no_gradient_that_does_not_add_up(gloo_world: World) -> None:
    class InBf16(Squares):
        def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return (model(batch[0]).float() - batch[1]).square().sum()

    sizes: Any = {"global_batch_size": WINDOW, "micro_batch_size": 2, "count": InBf16().count, "world": gloo_world}
    acc = Accumulator(model := Net(), torch.optim.SGD(model.parameters(), lr=0.05), **sizes)
    for window in acc.windows(DataSpec(train=samples(), shuffle=False)):
        acc.step(window, InBf16())
    assert acc.verified


def test_casts_follow_the_weights_within_a_context_of_the_users(gloo_world: World) -> None:
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    expected = truth(Net())
    with context():  # around the loop, and within accumulate()
        assert train(gloo_world, Net(), expected, whole=False) <= 2e-2
        assert train(gloo_world, Net(), expected, whole=False, around=context, precision="bf16") <= 2e-2
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_counts_add_up_or_are_told(gloo_world: World) -> None:
    def run(count: Callable[[Batch], int]) -> None:
        model = nn.Linear(6, 1)
        sizes: Any = {"global_batch_size": WINDOW, "micro_batch_size": 2, "count": count, "world": gloo_world}
        acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), **sizes)
        next(acc.windows(DataSpec(train=samples(), shuffle=False)))

    run(lambda batch: int((batch[0] > 0.5).sum()))
    with pytest.raises(VerificationError, match=r"count 4 alone and 2 together"):
        run(lambda batch: 2)
    with pytest.raises(VerificationError, match=r"count \d+ alone and \d+ together.*no max\(1, n\)"):
        run(lambda batch: max(2, int((batch[0] > 0.5).sum())))
