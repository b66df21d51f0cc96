"""Which modules compute in which format: what is kept or chosen by name, copied, compiled, interrupted."""

import pickle
import warnings
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

from distaccum.config.precision import PrecisionConfig
from distaccum.errors import ConfigError, PrecisionWarning
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import PrecisionPolicy
from distaccum.precision.selection import check_compiled, check_globs, check_parameters, describe

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
    apply_precision(module, policy, CPU)
    return module


def _assert_same_gradients(net: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype is torch.float32
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.grad.abs().sum() > 0


def _inputs() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def _hooks(model: nn.Module) -> list[str]:
    """The modules that have hooks, once for each; but for the one that awaits the end of the first forward."""
    return [
        name
        for name, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if getattr(hook, "__name__", "") != "_tell_of_the_uncalled"
    ]


def _awaited(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) - len(
        _hooks(model)
    )


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
    policy, reference, x = _policy(name, keep_fp32=["head"]), Net(), _inputs()
    net = _placed(Net(), policy)
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
    _assert_same_gradients(net, reference)


@pytest.mark.parametrize(("name", "dtype"), SIXTEEN_BIT)
def test_only_the_chosen_modules_are_autocast(name: str, dtype: torch.dtype) -> None:
    policy, reference, x = _policy(name, only=["blocks.1"]), Net(), _inputs()
    net = _placed(Net(), policy)
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
    _assert_same_gradients(net, reference)


def test_a_module_is_kept_inside_of_the_chosen_ones() -> None:
    policy = _policy(only=["blocks.*"], keep_fp32=["blocks.1", "blocks.0.layer"])
    net, types = _placed(Net(), policy), dict[str, torch.dtype]()
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
    net = _placed(Net(), _policy(keep_fp32=["head"], only=["blocks.0"]))
    assert sorted(set(_hooks(net))) == ["blocks.0", "head"]
    assert _awaited(net) == 1
    apply_precision(net, _policy(name, keep_fp32=["head"], only=["blocks.0"]), CPU)
    assert _hooks(net) == []
    assert not _awaited(net)


def test_the_last_placement_counts() -> None:
    net, policy = _placed(Net(), _policy(keep_fp32=["blocks.*"])), _policy("fp16", only=["head"])
    for _ in range(2):
        apply_precision(net, policy, CPU)
    assert _hooks(net) == ["head", "head"]  # one before its forward and one after it
    inside: dict[str, torch.dtype] = {}
    net.head.forward = _noting(inside, "head", net.head.forward)  # type: ignore[method-assign]
    with policy.autocast(CPU):
        net(_inputs())
    assert inside == {"head": torch.float16}


def test_only_the_topmost_of_what_matches_has_hooks() -> None:
    net = Net()
    for settings, names in (
        ({"keep_fp32": ["blocks.*", "head"]}, ["blocks.0", "blocks.1", "head"]),
        ({"keep_fp32": ["*"]}, [""]),
        ({"keep_fp32": ["blocks.0"], "only": ["blocks.0.layer", "blocks.1.layer"]}, ["blocks.0", "blocks.1.layer"]),
    ):
        assert sorted(set(_hooks(_placed(net, _policy(**settings))))) == names


def test_hooks_of_the_users_own_stay() -> None:
    net, calls = Net(), []
    net.head.register_forward_hook(lambda *_: calls.append("mine"))
    apply_precision(net, _policy(keep_fp32=["head"]), CPU)
    _placed(net, _policy("fp32"))(_inputs())
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
    apply_precision(net, _policy("fp32"), CPU)
    assert not _hooks(net)
    for copied in copies:
        assert _hooks(copied) == hooks
        with policy.autocast(CPU):
            assert torch.equal(copied(x), expected)
        assert copied.given.keys() == net.given.keys()
        apply_precision(copied, _policy("fp32"), CPU)
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
    hook = "register_forward_pre_hook" if where == "before" else "register_forward_hook"
    getattr(model[0], hook)(fail)
    apply_precision(model, policy, CPU)
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
    apply_precision(model, policy, CPU)
    assert _hooks(model) == ["a.0", "a.0"]
    apply_precision(model, _policy(keep_fp32=["b.0"]), CPU)
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
    check_globs(net, _policy(keep_fp32=["blocks.*.norm", "head"], only=["blocks.[01]", "*"]))  # which match
    assert not _hooks(net)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_16_bit_weights_are_refused_if_they_are_to_be_trained(dtype: torch.dtype, name: str) -> None:
    net = Net()
    net.head.to(dtype)
    shown = str(dtype).removeprefix("torch.")
    message = rf"model=Net: .*{shown} \(head\.weight and 1 more.*model\.float\(\).*precision={name}"
    with pytest.raises(ConfigError, match=message):
        check_parameters(net)
    net.head.requires_grad_(False)
    check_parameters(net)
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
        ({"only": ["blocks"]}, "bf16: blocks.0, blocks.1; fp32: all else"),
        ({"keep_fp32": ["blocks*"]}, "bf16; fp32: blocks.0, blocks.1"),
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


class Nested(nn.Module):
    """Lists of lists, and modules in a dictionary: none of these is ever called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 8)})
        self.scales = nn.ParameterList([torch.ones(8)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return self.heads["a"](x) * self.scales[0]  # type: ignore[no-any-return]


LAYERS = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


@pytest.mark.parametrize(
    ("settings", "names", "in_bf16"),
    [
        ({"keep_fp32": ["stages"]}, LAYERS, ["heads.a"]),
        ({"keep_fp32": ["stages*"]}, LAYERS, ["heads.a"]),
        ({"keep_fp32": ["heads"]}, ["heads.a"], LAYERS),
        ({"keep_fp32": ["*"]}, [""], []),
        ({"only": ["stages.1"]}, LAYERS[2:], LAYERS[2:]),
        ({"only": ["stages"], "keep_fp32": ["stages.0"]}, LAYERS, LAYERS[2:]),
        ({"only": ["stages"], "keep_fp32": ["stages.0.1"]}, LAYERS, [LAYERS[0], *LAYERS[2:]]),
    ],
)
def test_a_container_that_is_never_called_stands_for_what_it_holds(
    settings: dict[str, list[str]], names: list[str], in_bf16: list[str]
) -> None:
    net, policy = Nested(), _policy(**settings)
    check_globs(net, policy)
    apply_precision(net, policy, CPU)
    assert sorted(set(_hooks(net))) == names
    types: dict[str, torch.dtype] = {}
    for name in (*LAYERS, "heads.a"):
        module: Any = net.get_submodule(name)
        module.forward = _noting(types, name, module.forward)
    with policy.autocast(CPU):
        net(_inputs())
    assert [name for name, dtype in types.items() if dtype is torch.bfloat16] == in_bf16
    assert set(types.values()) <= {torch.bfloat16, torch.float32}


def test_a_container_with_a_forward_of_its_own_is_a_module_like_others() -> None:
    net = Net()
    net.blocks.forward = lambda x: net.blocks[1](net.blocks[0](x))
    assert set(_hooks(_placed(net, _policy(keep_fp32=["blocks"])))) == {"blocks"}


def test_parameters_in_a_list_are_not_what_a_glob_can_name() -> None:
    net = Nested()
    with pytest.raises(ConfigError, match=r"precision\.keep_fp32=scal\*: .*never called.*Name the module"):
        check_globs(net, _policy(keep_fp32=["scal*"]))
    check_globs(net, _policy(keep_fp32=["s*"]))  # it matches others too


def _uncalled(model: nn.Module, policy: PrecisionPolicy, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, policy.autocast(CPU):
        warnings.simplefilter("always")
        model(*args)
    return [str(warning.message) for warning in caught if warning.category is PrecisionWarning]


def test_a_module_whose_weights_are_read_without_calling_it_is_warned_of_once() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0), torch.randn(3, 1, 8)
    policy = _policy(keep_fp32=["self_attn.out_proj", "linear1"])
    apply_precision(layer, policy, CPU)
    copied = deepcopy(layer)
    [message] = _uncalled(layer, policy, x)
    assert message == (
        "precision.keep_fp32=[self_attn.out_proj,linear1]: self_attn.out_proj was not called in the first forward, "
        "so the setting had no effect on it"
    )
    assert not _awaited(layer)
    assert _uncalled(layer, policy, x) == []
    assert _awaited(copied)  # a copy has not been called yet
    assert _uncalled(copied, policy, x) == [message]
    assert not _awaited(copied)


def test_where_all_are_called_or_it_is_for_others_to_tell_nothing_is_said() -> None:
    policy = _policy(keep_fp32=["head"], only=["blocks"])
    net = _placed(Net(), policy)
    assert _awaited(net)
    assert _uncalled(net, policy, _inputs()) == []
    assert not _awaited(net)
    model = nn.TransformerEncoderLayer(8, 2, 8)
    apply_precision(model, _policy(only=["self_attn.out_proj"]), CPU, warn=False)
    assert _uncalled(model, _policy(only=["self_attn.out_proj"]), torch.randn(3, 1, 8)) == []


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, used: int) -> Tensor:
        for part in self.parts[:used]:
            x = part(x)
        if not used:
            raise ValueError("nothing used")
        return x


def test_a_forward_that_raises_is_not_the_first_and_several_are_named_in_one_line() -> None:
    policy = _policy(only=["parts"])
    net = _placed(Skipping(), policy)
    with pytest.raises(ValueError, match="nothing used"):
        _uncalled(net, policy, _inputs(), 0)
    [message] = _uncalled(net, policy, _inputs(), 1)
    assert message.startswith("precision.only=[parts]: parts.1, parts.2 were not called in the first forward")
    apply_precision(net, policy, CPU)
    apply_precision(net, policy, CPU)
    assert _awaited(net) == 1
    assert len(_uncalled(net, policy, _inputs(), 2)) == 1


@pytest.fixture
def compiler(compiler: None) -> Iterator[None]:
    """Without torch's own warnings as errors, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", PrecisionWarning)
        yield


def _compiled_inside(net: nn.Module, how: str) -> nn.Module:
    if how == "module":
        return torch.compile(net, backend="eager")  # type: ignore[return-value]
    if how == "in place":
        net.compile(backend="eager")
    elif how == "forward":
        net.forward = torch.compile(net.forward, backend="eager")
    else:
        net.blocks[0] = torch.compile(net.blocks[0], backend="eager")  # type: ignore[index,operator]
    return net


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("how", ["module", "in place", "forward", "a part"])
@pytest.mark.parametrize("key", ["keep_fp32", "only"])
def test_a_model_that_is_compiled_already_is_refused(how: str, key: str) -> None:
    """It may have run: torch then goes on with what it compiled, whatever hooks there are by now."""
    net = _compiled_inside(Net(), how)
    with pytest.raises(ConfigError, match=rf"precision\.{key}=.*norm.*compiled.*\.compile\(\)"):
        check_compiled(net, _policy(**{key: ["*blocks.0*norm"]}))
    check_compiled(net, _policy())
    check_compiled(net, _policy("fp32", **{key: ["*norm"]}))


@pytest.mark.usefixtures("compiler")
def test_what_is_compiled_beside_or_inside_of_a_placed_module_is_none_of_its_business() -> None:
    net, reference = Net(), Net()
    net.blocks[0] = torch.compile(net.blocks[0], backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(_inputs())  # compiled under autocast, and run before it is placed
    policy = _policy(keep_fp32=["blocks.0", "head"])
    check_compiled(net, policy)
    for model in (net, reference):
        apply_precision(model, policy, CPU)
    with policy.autocast(CPU):
        assert torch.equal(net(_inputs()), reference(_inputs()))
    assert net.given == reference.given


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))  # type: ignore[no-any-return]


_KEPT, _ONLY = {"keep_fp32": ["blocks.0", "head"]}, {"only": ["blocks.*"], "keep_fp32": ["*.0.norm"]}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(  # every two of the three values meet
    ("settings", "backend", "in_place"),
    [
        (_KEPT, "eager", True),
        (_KEPT, "aot_eager", False),
        (_ONLY, "eager", False),
        (_ONLY, "aot_eager", True),
        *(
            pytest.param(*rest, marks=pytest.mark.heavy)
            for rest in (
                (_KEPT, "eager", False),
                (_KEPT, "aot_eager", True),
                (_ONLY, "eager", True),
                (_ONLY, "aot_eager", False),
            )
        ),
    ],
)
def test_a_model_that_is_compiled_afterwards_computes_as_it_is_told(
    settings: dict[str, list[str]], backend: str, in_place: bool
) -> None:
    policy = _policy(**settings)
    net, reference = _placed(Plain(), policy), _placed(Plain(), policy)
    reference.load_state_dict(net.state_dict())
    if in_place:
        net.compile(backend=backend)
    called = net if in_place else torch.compile(net, backend=backend)
    before = _state()
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        with policy.autocast(CPU):
            given, expected = called(x), reference(x)
        assert _state() == before
        assert given.dtype is expected.dtype
        assert torch.equal(given, expected)
        for model, output in ((net, given), (reference, expected)):
            model.zero_grad()
            output.float().square().sum().backward()
        _assert_same_gradients(net, reference)
        with torch.no_grad():
            for parameter in (*net.parameters(), *reference.parameters()):
                parameter.mul_(-1.5)
    assert not _awaited(net)
