"""The settings of ``conf/precision/``: number formats, and the loss scaler of fp16."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from distaccum.config.checks import (
    require,
    require_annotated,
    require_choice,
    require_count,
    require_positive,
    settings_by_name,
)

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-weights", "fp8")
FP8_RECIPES = ("rowwise", "rowwise_with_gw_hp")
REDUCE_DTYPES = ("fp32", "bf16", "fp16")
_POWERS = range(-14, 65)
_SCALES = (2.0**-126, 2.0**127)  # of fp32
ALIASES = {  # what PyTorch, Lightning, Accelerate and Keras call them
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "16-mixed": "fp16",
    "float16": "fp16",
    "mixed_float16": "fp16",
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "mixed_bfloat16": "bf16",
}


def canonical(name: str) -> str:
    """The name of ``conf/precision/`` for a name or one of the ``ALIASES``; any other name as it is."""
    return ALIASES.get(name, name)


# OmegaConf reads `Optional[X]` but not `X | None` in schemas on every version supported, hence the noqa mark.
@dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """The loss scaler; in parentheses what DeepSpeed's JSON calls the same where it has another name.

    Args:
        initial_scale_power: The loss scale starts at two to this power: 16 means 65,536.
        growth_interval: Steps without an overflow after which the scale grows (``loss_scale_window``).
        growth_factor: Factor by which the scale grows.
        backoff_factor: Factor by which an overflow shrinks the scale.
        hysteresis: Overflows before the scale shrinks; the count restarts when the scale grows.
        consecutive_hysteresis: Restart the count of overflows after every applied step.
        min_scale: Lower limit of the scale (``min_loss_scale``).
        max_scale: Upper limit of the scale.
        static_scale: A constant loss scale, such as 1024 (``loss_scale``). null: a dynamic one.
    """

    initial_scale_power: int = 16
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    static_scale: Optional[float] = None  # noqa: UP045

    def __post_init__(self) -> None:
        key, power = "precision.scaler", self.initial_scale_power
        require_annotated(key, self)
        require(power in _POWERS, f"{key}.initial_scale_power", power, "out of range", "Use a number from -14 to 64")
        require_count(f"{key}.growth_interval", self.growth_interval, least=1)
        grows = 1.0 < self.growth_factor < float("inf")
        require(grows, f"{key}.growth_factor", self.growth_factor, "must be above 1", "Use a value such as 2")
        shrinks = 0.0 < self.backoff_factor < 1.0
        remedy = "Use a value such as 0.5"
        require(shrinks, f"{key}.backoff_factor", self.backoff_factor, "must lie between 0 and 1", remedy)
        require_count(f"{key}.hysteresis", self.hysteresis, least=1)
        for name, scale in (("min", self.min_scale), ("max", self.max_scale), ("static", self.static_scale)):
            require_positive(f"{key}.{name}_scale", scale)
            held = scale is None or _SCALES[0] <= scale <= _SCALES[1]
            require(held, f"{key}.{name}_scale", scale, "not a normal fp32 number", "Use a power of two near 1")
        if self.static_scale is None:
            held = self.min_scale <= self.initial_scale <= self.max_scale
            problem = f"2**{power} lies outside min_scale={self.min_scale:g} .. max_scale={self.max_scale:g}"
            require(held, f"{key}.initial_scale_power", power, problem, "Move one of the three")

    @property
    def initial_scale(self) -> float:
        """The scale of the first window."""
        return 2.0**self.initial_scale_power if self.static_scale is None else self.static_scale


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What the forward computes in, and what else is not fp32. What is stepped and accumulated always is.

    Args:
        name (fp32 | tf32 | bf16 | fp16 | bf16-weights | fp8): the number format, also under the names of ``ALIASES``.
            ``bf16-weights``: ``bf16``, and the weights too, each the rounding of an fp32 master that the optimizer
            steps. ``fp8``: ``bf16``, and products of linear layers in 8 bits.
        reduce_dtype (fp32 | bf16 | fp16): Number format in which gradients are reduced.
        keep_fp32: Names of modules that stay in fp32, as patterns such as ``[norm,head.*]``.
        only: Names of the modules that use the lower precision, as patterns. Empty: all.
        underflow_every: With fp16: steps between two samples of the share of gradients that underflow to zero. 0: off.
        fp8_recipe (rowwise | rowwise_with_gw_hp): With fp8: torchao's recipe. ``rowwise_with_gw_hp`` computes the
            gradients of weights in bf16.
        fp8_modules: With fp8: names of its linear layers, or of what holds them, as patterns. Empty: all in the blocks.
        fp8_emulate: With fp8: round as fp8 does on CPUs and GPUs without it. Slower than fp32.
        split_k_16bit: Allow cuBLAS to add partial products in 16 bits, as torch does by default; faster, less exact.
        scaler: the loss scaler.
    """

    name: str = "fp32"
    reduce_dtype: str = "fp32"
    keep_fp32: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    underflow_every: int = 100
    fp8_recipe: str = "rowwise"
    fp8_modules: list[str] = field(default_factory=list)
    fp8_emulate: bool = False
    split_k_16bit: bool = False
    scaler: ScalerConfig = field(default_factory=ScalerConfig)

    def __post_init__(self) -> None:
        require_annotated("precision", self)
        object.__setattr__(self, "name", canonical(self.name))
        require_choice("precision", self.name, PRECISIONS)
        remedy = "Name what stays in fp32 (precision.keep_fp32), or use precision=bf16"
        problem = "precision=bf16-weights has the weights of all modules in bf16 but for those of keep_fp32"
        require(not (self.keeps_masters and self.only), "precision.only", self.only, problem, remedy)
        require_choice("precision.reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)
        key, recipe = "precision.fp8_recipe", self.fp8_recipe
        problem = "one scale for a whole tensor makes a sample's rounding depend on the others of its micro-batch"
        require(recipe != "tensorwise", key, recipe, problem, f"Use {' or '.join(FP8_RECIPES)}")
        require_choice(key, recipe, FP8_RECIPES)
        require_count("precision.underflow_every", self.underflow_every, off="0 to sample none")

    @classmethod
    def of(cls, precision: str | PrecisionConfig) -> PrecisionConfig:
        """The settings of a policy that is given by name, or as they are.

        Raises:
            ConfigError: it is neither, or no policy has that name.
        """
        return settings_by_name(cls, precision, key="precision", names=PRECISIONS)

    @property
    def casts(self) -> bool:
        """Whether the forward computes in a 16-bit format."""
        return self.name in ("bf16", "fp16", "bf16-weights", "fp8")

    @property
    def keeps_masters(self) -> bool:
        """Whether weights are roundings of fp32 masters."""
        return self.name == "bf16-weights"

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16, whose range needs the loss scaler."""
        return "fp16" in (self.name, self.reduce_dtype)
