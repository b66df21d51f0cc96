"""What each precision computes, steps and reduces in, and which devices it needs."""

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch

from distaccum.config.precision import PRECISIONS, PrecisionConfig
from distaccum.errors import ConfigError, PrecisionWarning
from distaccum.precision import hardware
from distaccum.precision.hardware import Gpu
from distaccum.precision.policy import PrecisionPolicy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _policy(name: str, **settings: object) -> PrecisionPolicy:
    return PrecisionPolicy.of(PrecisionConfig(name=name, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "compute"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_every_policy_steps_fp32_weights_and_computes_in_its_own_type(name: str, compute: torch.dtype) -> None:
    policy = _policy(name=name)
    assert (policy.name, policy.compute_dtype) == (name, compute)
    assert policy.parameter_dtype is policy.reduce_dtype is torch.float32
    assert (policy.keep_fp32, policy.only) == ((), ())


def test_weights_are_bf16_where_they_have_masters() -> None:
    policy = _policy(name="bf16-weights")
    assert policy.compute_dtype is policy.parameter_dtype is torch.bfloat16
    assert (policy.reduce_dtype, policy.keeps_masters, policy.casts) == (torch.float32, True, True)
    assert not _policy(name="bf16").keeps_masters
    with pytest.raises(ConfigError, match=r"precision\.only.*keep_fp32.*precision=bf16"):
        _policy(name="bf16-weights", only=["block"])


def test_what_is_set_beside_the_name_arrives_and_cannot_change() -> None:
    globs = ["head"]
    policy = _policy(name="bf16", reduce_dtype="fp16", keep_fp32=globs, only=["blocks.*"])
    globs.append("more")
    assert policy.reduce_dtype is torch.float16
    assert (policy.keep_fp32, policy.only) == (("head",), ("blocks.*",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "fp32"  # type: ignore[misc]
    assert policy in {policy}  # hashable, as what is immutable should be


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_loss_is_scaled_where_gradients_pass_through_fp16(name: str, reduce_dtype: str) -> None:
    config = PrecisionConfig(name=name, reduce_dtype=reduce_dtype)
    expected = name == "fp16" or reduce_dtype == "fp16"
    assert PrecisionPolicy.of(config).scales_loss is config.scales_loss is expected


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_forward_is_autocast_to_the_16_bit_types_only(name: str) -> None:
    policy, weight = _policy(name=name), torch.ones(2, 2)
    with policy.autocast(CPU):
        assert (weight @ weight).dtype is policy.compute_dtype
    assert (weight @ weight).dtype is torch.float32


def test_around_chosen_modules_the_context_has_autocast_off_and_ends_what_a_hook_left_on() -> None:
    policy = _policy(name="bf16", only=["block"])
    with policy.autocast(CPU):
        assert not torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", True)  # as an interrupt between the hooks leaves it
    assert not torch.is_autocast_enabled("cpu")


P100 = Gpu(name="Tesla P100", capability=(6, 0), bf16=False, tf32=False)
T4 = Gpu(name="Tesla T4", capability=(7, 5), bf16=False, tf32=False)
A100 = Gpu(name="NVIDIA A100", capability=(8, 0), bf16=True, tf32=True)
MI250 = Gpu(name="AMD Instinct MI250X", capability=(9, 0), bf16=True, tf32=False)


@pytest.mark.parametrize(
    ("name", "gpu", "named"),
    [
        ("bf16", P100, ["precision=bf16", "Tesla P100 (compute capability 6.0)", "precision=fp16, or fp32"]),
        ("bf16", T4, ["precision=bf16", "Tesla T4 (compute capability 7.5)", "precision=fp16, or fp32"]),
        ("tf32", T4, ["precision=tf32", "Tesla T4 (compute capability 7.5)", "precision=fp32, or fp16"]),
        ("tf32", MI250, ["precision=tf32", "AMD Instinct MI250X", "precision=fp32"]),
        ("tf32", None, ["precision=tf32", "a CPU", "precision=fp32, or bf16"]),
    ],
)
def test_what_the_hardware_cannot_do_is_refused_by_name(name: str, gpu: Gpu | None, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        hardware.check(_policy(name), gpu)
    assert all(words in str(caught.value) for words in named), caught.value


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *((name, A100) for name in PRECISIONS),
        *((name, None) for name in PRECISIONS if name != "tf32"),
        ("fp32", P100),
        ("fp16", P100),
        ("fp32", T4),
        ("fp16", T4),
        ("bf16", MI250),
    ],
)
def test_what_it_can_do_is_not(name: str, gpu: Gpu | None) -> None:
    hardware.check(_policy(name), gpu)


@pytest.mark.parametrize(
    ("gpu", "named"), [(None, ["precision=fp16", "CPU", "bf16"]), (P100, ["precision=fp16", "Tesla P100", "fp32"])]
)
def test_fp16_without_the_arithmetic_for_it_is_warned_of(gpu: Gpu | None, named: list[str]) -> None:
    text = hardware.slowness(_policy("fp16"), gpu) or ""
    assert all(words in text for words in named), text


@pytest.mark.parametrize(
    ("name", "gpu"), [("fp16", T4), ("fp16", A100), ("bf16", None), ("fp32", None), ("fp32", P100)]
)
def test_nothing_else_is(name: str, gpu: Gpu | None) -> None:
    assert hardware.slowness(_policy(name, reduce_dtype="fp16"), gpu) is None


def test_this_machines_cpu_is_asked() -> None:
    assert hardware.gpu_of(CPU) is None
    hardware.check(_policy("bf16"), hardware.gpu_of(CPU))
    with pytest.raises(ConfigError, match="precision=tf32"):
        hardware.check(_policy("tf32"), hardware.gpu_of(CPU))
    with pytest.warns(PrecisionWarning, match="precision=fp16") as caught:
        hardware.warn(_policy("fp16"), CPU)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_process_is_warned_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            hardware.warn(_policy("fp16"), CPU)
    assert len(caught) == 1


@pytest.fixture
def switches() -> Iterator[None]:
    """Torch's own for TF32, as they were."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _state() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("switches")
def test_tf32_is_on_where_it_is_asked_for_and_nowhere_else() -> None:
    for name in (*PRECISIONS, *reversed(PRECISIONS)):
        hardware.configure(_policy(name), CUDA)
        assert _state() == (name == "tf32", name == "tf32"), name


@pytest.mark.parametrize("wanted", [False, True])
def test_parts_of_16_bit_products_are_added_in_16_bits_only_where_it_is_asked_for(wanted: bool) -> None:
    """Torch's own default is that they are, on every GPU."""
    matmul = torch.backends.cuda.matmul
    kinds = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, kind) for kind in kinds]
    try:
        for kind in kinds:
            setattr(matmul, kind, not wanted)
        hardware.configure(PrecisionPolicy.of(PrecisionConfig(name="bf16", split_k_16bit=wanted)), CUDA)
        assert [getattr(matmul, kind) for kind in kinds] == [wanted, wanted]
    finally:
        for kind, value in zip(kinds, before, strict=True):
            setattr(matmul, kind, value)


@pytest.mark.usefixtures("switches")
def test_a_cpu_run_leaves_the_switches_alone() -> None:
    for state in ((True, False), (False, True)):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = state
        hardware.configure(_policy("fp32"), CPU)
        assert _state() == state


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 brought these settings")
@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_a_wider_setting_does_not_reach_through(name: str) -> None:
    """``cudnn.fp32_precision`` is what convolutions do that have no setting of their own."""
    cudnn, other = torch.backends.cudnn, "ieee" if name == "tf32" else "tf32"
    before = cudnn.fp32_precision
    try:
        cudnn.fp32_precision = other
        hardware.configure(_policy(name), CUDA)
        wanted = "tf32" if name == "tf32" else "ieee"
        assert cudnn.conv.fp32_precision == cudnn.rnn.fp32_precision == wanted
        assert torch.backends.cuda.matmul.fp32_precision == wanted
    finally:
        cudnn.fp32_precision = before
