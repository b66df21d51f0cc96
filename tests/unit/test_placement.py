from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from distaccum.errors import ConfigError
from distaccum.precision.placement import check_globs, check_parameters, describe, place
from distaccum.precision.policy import PrecisionPolicy
from distaccum.precision_config import PrecisionConfig

CPU = torch.device("cpu")
SIXTEEN_BIT = [("bf16", torch.bfloat16), ("fp16", torch.float16)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


class Net(nn.Module):
    """Notes the type of what each part gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.given: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            self.given[f"blocks.{number}"] = x.dtype
        x = self.head(x)
        self.given["head"] = x.dtype
        return x


def _policy(name: str = "bf16", **settings: Any) -> PrecisionPolicy:
    return PrecisionPolicy.of(PrecisionConfig(name=name, **settings))


def _placed(module: nn.Module, policy: PrecisionPolicy) -> nn.Module:
    place(module, policy, CPU)
    return module


def _inputs() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def _hooks(model: nn.Module) -> list[str]:
    """The modules that have hooks, once for each."""
    return [
        name
        for name, module in model.named_modules()
        for _ in (*module._forward_pre_hooks, *module._forward_hooks)  # what is left over must be seen as well
    ]


def _state() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """No test leaves autocast otherwise than it found it."""
    before = _state()
    yield
    after = _state()
    torch.set_autocast_enabled("cpu", before[0])
    torch.set_autocast_dtype("cpu", before[1])
    torch.set_autocast_cache_enabled(before[2])
    assert after == before


@pytest.mark.parametrize(("name", "dtype"), SIXTEEN_BIT)
def test_a_kept_module_gives_bitwise_what_it_gives_alone(name: str, dtype: torch.dtype) -> None:
    net, reference, x = Net(), Net(), _inputs()
    policy = _policy(name, keep_fp32=["head"])
    place(net, policy, CPU)
    with policy.autocast(CPU):
        given = net(x)
    with torch.autocast("cpu", dtype=dtype):
        trunk = reference.blocks[1](reference.blocks[0](x))
    assert trunk.dtype is dtype
    expected = reference.head(trunk.float())
    assert given.dtype is torch.float32
    assert torch.equal(given, expected)
    assert net.given == {"blocks.0": dtype, "blocks.1": dtype, "head": torch.float32}
    given.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype is torch.float32
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(("name", "dtype"), SIXTEEN_BIT)
def test_only_the_chosen_modules_are_autocast(name: str, dtype: torch.dtype) -> None:
    net, reference, x = Net(), Net(), _inputs()
    policy = _policy(name, only=["blocks.1"])
    place(net, policy, CPU)
    inside: list[torch.dtype] = []
    net.blocks[1].layer.register_forward_hook(lambda *call: inside.append(call[2].dtype))
    with policy.autocast(CPU):
        given = net(x)
    first = reference.blocks[0](x)
    with torch.autocast("cpu", dtype=dtype):
        second = reference.blocks[1](first)
    expected = reference.head(second.float())
    assert inside == [dtype]
    assert set(net.given.values()) == {torch.float32}
    assert torch.equal(given, expected)
    given.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.grad.abs().sum() > 0


def test_a_module_is_kept_inside_of_the_chosen_ones() -> None:
    net, policy = Net(), _policy(only=["blocks.*"], keep_fp32=["blocks.1", "blocks.0.layer"])
    place(net, policy, CPU)
    types: dict[str, torch.dtype] = {}

    for number, block in enumerate(net.blocks):
        for part in ("norm", "layer"):
            module = getattr(block, part)
            module.forward = _noting(types, f"{number}.{part}", module.forward)
    with policy.autocast(CPU):
        net(_inputs())
    fp32 = torch.float32
    assert types == {"0.norm": torch.bfloat16, "0.layer": fp32, "1.norm": fp32, "1.layer": fp32}
    assert net.given["blocks.0"] is fp32


def _noting(types: dict[str, torch.dtype], name: str, forward: Any) -> Any:
    def noted(x: Tensor) -> Tensor:
        types[name] = (x @ x.T).dtype
        given: Tensor = forward(x)
        return given

    return noted


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_fp32_places_nothing_and_takes_away_what_was_placed(name: str) -> None:
    net = Net()
    place(net, _policy(keep_fp32=["head"], only=["blocks.0"]), CPU)
    assert sorted(set(_hooks(net))) == ["blocks.0", "head"]
    place(net, _policy(name, keep_fp32=["head"], only=["blocks.0"]), CPU)
    assert _hooks(net) == []


def test_the_last_placement_counts() -> None:
    net = Net()
    place(net, _policy(keep_fp32=["blocks.*"]), CPU)
    place(net, _policy("fp16", only=["head"]), CPU)
    policy = _policy("fp16", only=["head"])
    place(net, policy, CPU)
    assert _hooks(net) == ["head", "head"]  # one before its forward and one after it
    inside: list[torch.dtype] = []
    net.head.forward = _noting_type(inside, net.head.forward)  # type: ignore[method-assign]
    with policy.autocast(CPU):
        net(_inputs())
    assert inside == [torch.float16]


def _noting_type(inside: list[torch.dtype], forward: Any) -> Any:
    def noted(x: Tensor) -> Tensor:
        given: Tensor = forward(x)
        inside.append(given.dtype)
        return given

    return noted


def test_only_the_topmost_of_what_matches_has_hooks() -> None:
    net = Net()
    place(net, _policy(keep_fp32=["blocks.*", "head"]), CPU)
    assert sorted(set(_hooks(net))) == ["blocks.0", "blocks.1", "head"]
    place(net, _policy(keep_fp32=["*"]), CPU)
    assert set(_hooks(net)) == {""}
    place(net, _policy(keep_fp32=["blocks.0"], only=["blocks.0.layer", "blocks.1.layer"]), CPU)
    assert sorted(set(_hooks(net))) == ["blocks.0", "blocks.1.layer"]


def test_hooks_of_the_users_own_stay() -> None:
    net, calls = Net(), []
    net.head.register_forward_hook(lambda *_: calls.append("mine"))
    policy = _policy(keep_fp32=["head"])
    place(net, policy, CPU)
    place(net, _policy("fp32"), CPU)
    net(_inputs())
    assert calls == ["mine"]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Output:
    hidden: Tensor
    label: str = ""


class Named(OrderedDict[str, Any]):
    """As Hugging Face's outputs: a dict whose entries are attributes, and which cannot be updated."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError


class Mirror(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_a_kept_module_takes_its_arguments_in_fp32_at_any_depth() -> None:
    policy = _policy(keep_fp32=["0"])
    model = _placed(nn.Sequential(Mirror()), policy)
    half, brain = torch.tensor([1.5], dtype=torch.float16), torch.tensor([2.5], dtype=torch.bfloat16)
    double, whole = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    untouched = {"a": [double, whole], "b": (None, "text", torch.Size([2]))}
    given = Named(x=half, y=double)
    with policy.autocast(CPU):
        args, kwargs = model[0](
            half, Pair([brain, whole], double), untouched, given, mask=(half, {"deep": brain}), out=Output(brain, "l")
        )
    first, pair, same, named = args
    assert torch.equal(first, torch.tensor([1.5]))
    assert first.dtype is torch.float32
    assert isinstance(pair, Pair)
    assert torch.equal(pair.first[0], torch.tensor([2.5]))
    assert pair.first[1] is whole
    assert pair.second is double
    assert same is untouched
    assert isinstance(named, Named)
    assert (named.x.dtype, named.y) == (torch.float32, double)
    assert given.x is half  # the caller's own is left as it was
    assert (kwargs["mask"][0].dtype, kwargs["mask"][1]["deep"].dtype) == (torch.float32, torch.float32)
    assert isinstance(kwargs["out"], Output)
    assert (kwargs["out"].hidden.dtype, kwargs["out"].label) == (torch.float32, "l")


def test_a_chosen_module_gives_its_outputs_in_fp32_at_any_depth() -> None:
    policy = _policy(only=["0"])
    model = _placed(nn.Sequential(Mirror()), policy)
    half, double = torch.tensor([1.5], dtype=torch.float16), torch.ones(1, dtype=torch.float64)
    (pair, kept), kwargs = model[0](Pair(half, double), [double], named=Named(x=half))
    assert (type(pair), pair.first.dtype, pair.second) == (Pair, torch.float32, double)
    assert kept == [double]
    assert kwargs["named"].x.dtype is torch.float32


@pytest.mark.parametrize("settings", [{"keep_fp32": ["blocks.1", "head"]}, {"only": ["blocks.*"]}])
def test_a_copy_has_hooks_of_its_own(settings: dict[str, list[str]]) -> None:
    policy, x = _policy(**settings), _inputs()
    net = _placed(Net(), policy)
    with policy.autocast(CPU):
        expected = net(x)
    copies = [deepcopy(net), deepcopy(deepcopy(net)), pickle.loads(pickle.dumps(net))]  # noqa: S301  our own bytes
    hooks = _hooks(net)
    place(net, _policy("fp32"), CPU)
    assert not _hooks(net)
    for copied in copies:
        assert _hooks(copied) == hooks
        with policy.autocast(CPU):
            assert torch.equal(copied(x), expected)
        assert copied.given.keys() == net.given.keys()
        place(copied, _policy("fp32"), CPU)
        assert not _hooks(copied)


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.fails = True
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.fails:
            raise self.error
        return x


@pytest.mark.parametrize("settings", [{"keep_fp32": ["1"]}, {"only": ["1"]}, {"only": ["*"], "keep_fp32": ["1"]}])
@pytest.mark.parametrize("around", [True, False])
def test_a_forward_that_raises_leaves_autocast_as_it_was(settings: dict[str, list[str]], around: bool) -> None:
    policy = _policy(**settings)
    model = _placed(nn.Sequential(nn.Linear(8, 8), Failing(ValueError("mine"))), policy)
    x = torch.ones(1, 8)
    with torch.autocast("cpu", dtype=torch.float16, enabled=around):
        before = _state()
        for _ in range(2):
            with pytest.raises(ValueError, match="mine"):
                model(x)
            assert _state() == before
        model[1].fails = False
        model(x)
        assert _state() == before


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_hook_that_raises_leaves_autocast_as_it_was(where: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("hook")

    policy = _policy(only=["0"])
    model = nn.Sequential(nn.Linear(8, 8))
    if where == "before":
        model[0].register_forward_pre_hook(fail)
    else:
        model[0].register_forward_hook(fail)
    place(model, policy, CPU)
    before = _state()
    with pytest.raises(ValueError, match="hook"):
        model(torch.ones(1, 8))
    assert _state() == before


@pytest.mark.parametrize("settings", [{"keep_fp32": ["1"]}, {"only": ["1"]}])
def test_an_interrupted_forward_leaves_neither_autocast_nor_old_weights_behind(settings: dict[str, list[str]]) -> None:
    """Ctrl-C gets past hooks; and where autocast lost count, it would go on with casts of the weights of that time."""
    policy = _policy(**settings)
    model, x = _placed(nn.Sequential(nn.Linear(8, 8), Failing(KeyboardInterrupt())), policy), _inputs()
    before = _state()
    with pytest.raises(KeyboardInterrupt), policy.autocast(CPU):
        model(x)
    assert _state() == before
    model[1].fails = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    with policy.autocast(CPU):
        after = model(x)
    fresh = _placed(nn.Sequential(nn.Linear(8, 8), Failing(ValueError())), policy)
    fresh[1].fails = False
    fresh.load_state_dict(model.state_dict())
    with policy.autocast(CPU):
        assert torch.equal(after, fresh(x))
    assert _state() == before


def test_a_model_that_is_called_without_the_policys_context_uses_its_new_weights_too() -> None:
    policy, x = _policy(only=["*"]), _inputs()
    model = _placed(nn.Linear(8, 8), policy)
    first = model(x)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    assert first.dtype is torch.float32
    assert first.abs().sum() > 0
    assert model(x).abs().sum() == 0


def test_within_the_policys_context_a_weight_is_cast_once() -> None:
    """As under torch.autocast itself: a recurrent module would hold a copy of its weights for every step otherwise."""

    class Casts(TorchDispatchMode):
        shapes: ClassVar[list[torch.Size]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                self.shapes.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    policy = _policy(only=["0"])
    model = _placed(nn.Sequential(nn.Linear(8, 6)), policy)
    with policy.autocast(CPU), Casts():
        for _ in range(3):
            model(_inputs())
    assert Casts.shapes.count(model[0].weight.shape) == 1


class Again(nn.Module):
    """Calls itself, with something else of the forward left to do at every depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor, depth: int) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        x = self.layer(x)
        self.types.append(x.dtype)
        return x


@pytest.mark.parametrize(
    ("settings", "expected"), [({"keep_fp32": ["0"]}, torch.float32), ({"only": ["0"]}, torch.bfloat16)]
)
def test_a_module_may_call_itself(settings: dict[str, list[str]], expected: torch.dtype) -> None:
    policy = _policy(**settings)
    model = _placed(nn.Sequential(Again()), policy)
    with policy.autocast(CPU):
        before = _state()
        model[0](_inputs(), depth=3)
        assert _state() == before
    assert model[0].types == [expected] * 4


def test_a_module_in_two_places_is_found_by_either_name() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8)), "b": nn.Sequential()})
    model["b"].append(model["a"][0])
    policy = _policy(keep_fp32=["b.0", "a.0"])
    check_globs(model, policy)
    place(model, policy, CPU)
    assert _hooks(model) == ["a.0", "a.0"]
    place(model, _policy(keep_fp32=["b.0"]), CPU)
    assert _hooks(model) == ["a.0", "a.0"]
    with policy.autocast(CPU):
        assert model["a"](_inputs()).dtype is torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", [{"keep_fp32": ["blocks.0.layer", "head"]}, {"only": ["blocks.1.layer"]}])
def test_recomputed_activations_have_the_same_gradient(settings: dict[str, list[str]], reentrant: bool) -> None:
    """The recomputation is stopped by an exception once it has what it needs, inside of a module's forward."""
    policy = _policy(**settings)
    gradients = []
    for recompute in (False, True):
        net, x = _placed(Net(), policy), _inputs().requires_grad_()
        with policy.autocast(CPU):
            for block in net.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
            total = net.head(x).float().square().sum()
        total.backward()
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    plain, recomputed = gradients
    assert len(plain) == len(recomputed) == 10
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize(
    ("settings", "key", "glob", "words"),
    [
        ({"keep_fp32": ["head", "haed"]}, "precision.keep_fp32", "haed", ["did you mean head?", "blocks, head"]),
        ({"only": ["blocks.*.nrom"]}, "precision.only", "blocks.*.nrom", ["did you mean blocks.", ".norm"]),
        ({"name": "fp32", "only": ["Head"]}, "precision.only", "Head", ["did you mean head?"]),
    ],
)
def test_a_glob_that_matches_nothing_is_a_mistake(
    settings: dict[str, Any], key: str, glob: str, words: list[str]
) -> None:
    net = Net()
    with pytest.raises(ConfigError) as caught:
        check_globs(net, _policy(**settings))
    assert (caught.value.key, caught.value.value) == (key, glob)
    assert all(word in str(caught.value) for word in ("matches no module of Net", *words)), caught.value
    assert not _hooks(net)


def test_globs_that_match_are_none() -> None:
    net = Net()
    check_globs(net, _policy(keep_fp32=["blocks.*.norm", "head"], only=["blocks.[01]", "*"]))
    assert not _hooks(net)


def test_float16_weights_are_refused_if_they_are_to_be_trained() -> None:
    net = Net()
    net.head.half()
    with pytest.raises(ConfigError, match=r"model=Net: .*head\.weight and 1 more.*model\.float\(\)"):
        check_parameters(net)
    net.head.requires_grad_(False)
    check_parameters(net)
    check_parameters(Net().bfloat16())
    check_parameters(Net().double())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"name": "fp32"}, "fp32"),
        ({"name": "fp32", "keep_fp32": ["head"]}, "fp32"),
        ({"name": "tf32"}, "tf32 (matrix products and convolutions)"),
        ({"name": "bf16", "reduce_dtype": "bf16"}, "bf16; gradients reduced in bf16"),
        ({"name": "fp32", "reduce_dtype": "fp16"}, "fp32; gradients reduced in fp16"),
        ({"name": "fp16", "keep_fp32": ["head", "*.norm"]}, "fp16; fp32: blocks.0.norm, blocks.1.norm, head"),
        ({"only": ["blocks.*"]}, "bf16: blocks.0, blocks.1; fp32: all else"),
        ({"only": ["blocks.1"], "keep_fp32": ["blocks.1.norm"]}, "bf16: blocks.1; fp32: blocks.1.norm, all else"),
        ({"keep_fp32": ["*"]}, "bf16; fp32: the whole model"),
        (
            {"keep_fp32": ["*.norm", "*.layer", "head"]},
            "bf16; fp32: blocks.0.norm, blocks.0.layer, blocks.1.norm, blocks.1.layer and 1 more",
        ),
    ],
)
def test_one_line_says_what_computes_in_what(settings: dict[str, Any], line: str) -> None:
    assert describe(Net(), _policy(**settings)) == line
