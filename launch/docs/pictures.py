"""The pictures of docs/: SVG, drawn from what the code says, on a light ground of their own for dark pages."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from distaccum.config.engine import ENGINES, DeepSpeedConfig, EngineConfig, FSDP2Config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.plan.batch import BatchPlan
from distaccum.tools.plan.memory import state
from distaccum.tools.plan.sharding import formats_of, sharding_of
from distaccum.tools.plan.window import Job, Sizes

IMAGES = Path(__file__).parents[2] / "docs" / "images"
INK, QUIET, GROUND, LINE = "#1f2430", "#5b6472", "#fbfbfd", "#c9ced8"
BLUE, DARK_BLUE, AMBER, GREEN, RED = "#a9c7f2", "#2f62b5", "#f3c26b", "#9fd3a8", "#e29a93"
PLAN = BatchPlan(samples=29, global_batch_size=26, micro_batch_size=3, world_size=4)
RANKS = 8
NARROW = 26  # too narrow for a number


class Drawing:
    """An SVG of one size, to which shapes are added."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}"'
        font = f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}"'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, dashed: bool = False) -> None:
        """A rectangle."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {size} rx="3" fill="{fill}" stroke="{QUIET}" stroke-width="0.8"{dashes}/>')

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, size: int = 13) -> None:
        """One line of text, which begins, is centred (``middle``) or ends at ``x``."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"'
        self.parts.append(f"<text {place}>{escape(words)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False, fill: str = QUIET) -> None:
        """A line, with a head at its end if it is an ``arrow``, which goes right, down or up."""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{fill}" stroke-width="1.4"/>')
        if arrow and y1 == y2:
            self.parts.append(f'<path d="M{x2:g} {y2:g} l-8 -4 v8 z" fill="{fill}"/>')
        elif arrow:
            up = 8 if y2 > y1 else -8
            self.parts.append(f'<path d="M{x2:g} {y2:g} l-4 {-up} h8 z" fill="{fill}"/>')

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def timeline() -> str:
    """The windows of ``PLAN`` on its ranks: micro-steps in a row, the reduction on all ranks at once."""
    sample, gap, left, row, top = 34, 6, 70, 46, 66
    windows = range(PLAN.windows_per_epoch)
    width = left + sum(_window_width(k, sample, gap) for k in windows) + 20
    drawing = Drawing(
        width, top + row * PLAN.world_size + 64, "Micro-steps and reductions of two windows on four ranks"
    )
    for rank in range(PLAN.world_size):
        drawing.text(18, top + row * rank + 24, f"rank {rank}")
    bottom, x = top + row * PLAN.world_size, float(left)
    for k in windows:
        positions = PLAN.window(k)
        said = f"window {k}: samples {positions[0]} to {positions[-1]}, count {len(positions)}"
        drawing.text(x, 26, said, fill=DARK_BLUE)
        drawing.line(x + 4, top - 14, x + 4, bottom, fill=AMBER)
        drawing.text(x, 46, "count", fill=QUIET, size=11)
        end = x + _window_width(k, sample, gap) - 74
        for rank in range(PLAN.world_size):
            taken = [micro for micro in PLAN.micro_batches(k, rank) if micro]
            y, at = top + row * rank, x + 14
            for micro in taken:
                last = micro is taken[-1]
                drawing.box(at, y, sample * len(micro), 34, DARK_BLUE if last else BLUE)
                named = ", ".join(map(str, micro)) if len(micro) > 1 else str(micro[0])
                middle = at + sample * len(micro) / 2
                drawing.text(middle, y + 22, named, anchor="middle", fill="white" if last else INK, size=12)
                at += sample * len(micro) + gap
            if not taken:
                drawing.box(at, y, end - at - gap, 34, "none", dashed=True)
                drawing.text((at + end - gap) / 2, y + 22, "nothing: zeros", anchor="middle", fill=QUIET, size=11)
        drawing.box(end, top - 6, 22, bottom - top, AMBER)
        drawing.text(end + 11, 46, "reduction", anchor="middle", fill=QUIET, size=11)
        drawing.box(end + 30, top - 6, 22, bottom - top, GREEN)
        drawing.text(end + 41, bottom + 12, "step", anchor="middle", fill=QUIET, size=11)
        x += _window_width(k, sample, gap)
    y, at = bottom + 34.0, float(left)
    for fill, words in (
        (BLUE, "micro-step, local"),
        (DARK_BLUE, "last micro-step: the boundary"),
        (AMBER, "all ranks"),
    ):
        drawing.box(at, y - 11, 14, 14, fill)
        drawing.text(at + 20, y, words, size=12)
        at += 42 + 7 * len(words)
    return drawing.svg()


def _window_width(k: int, sample: int, gap: int) -> int:
    """From the window's count to the end of its step."""
    ranks = range(PLAN.world_size)
    longest = max(sum(sample * len(m) + gap for m in PLAN.micro_batches(k, rank) if m) for rank in ranks)
    return max(14 + longest + 74, 250)


def held() -> dict[str, dict[str, float]]:
    """Bytes an element of the model on each of ``RANKS`` ranks, by engine and part, as the forecast has them."""
    rows: dict[str, EngineConfig] = {name: kind() for name, kind in ENGINES.items() if name != "deepspeed"}
    rows["fsdp2, sync=every"] = FSDP2Config(sync="every")
    rows |= {f"deepspeed, stage {stage}": DeepSpeedConfig(stage=stage) for stage in (1, 2, 3)}
    elements = RANKS * 1_000_000
    found = {}
    for name, engine in rows.items():
        sizes = Sizes(tensors=(elements,), blocks=(elements,))
        job = Job(
            sizes=sizes,
            sharding=sharding_of(engine),
            formats=formats_of(engine, PrecisionConfig()),
            global_batch_size=8,
            micro_batch_size=1,
        )
        parts = {part: size / elements for part, size in state(job, RANKS).items() if part != "total"}
        found[name] = parts
    return found


def holdings() -> str:
    """What a rank holds between two micro-steps, by engine: bars of bytes an element."""
    colours = {"parameters": BLUE, "weight copies": RED, "gradients": AMBER, "optimizer state": GREEN}
    rows, unit, left, row, top = held(), 30, 170, 40, 62
    longest = max(sum(parts.values()) for parts in rows.values())
    width = int(left + unit * longest + 90)
    drawing = Drawing(width, top + row * len(rows) + 20, f"Bytes an element of the model on each of {RANKS} ranks")
    drawing.text(
        18, 24, f"bytes on a rank, for each of the model's elements: fp32, Adam, {RANKS} ranks", fill=DARK_BLUE
    )
    x = float(left)
    for part, fill in colours.items():
        drawing.box(x, 38, 12, 12, fill)
        drawing.text(x + 18, 49, part, size=12)
        x += 40 + 7 * len(part)
    for i, (name, parts) in enumerate(rows.items()):
        y, x = top + row * i, float(left)
        drawing.text(left - 12, y + 20, name, anchor="end")
        for part, fill in colours.items():
            size = parts.get(part, 0.0)
            if size:
                drawing.box(x, y + 4, unit * size, 24, fill)
                if unit * size > NARROW:
                    drawing.text(x + unit * size / 2, y + 21, f"{size:g}", anchor="middle", size=12)
            x += unit * size
        drawing.text(x + 10, y + 21, f"{sum(parts.values()):.4g}", size=13)
    return drawing.svg()


def checkpoint() -> str:
    """The life of a checkpoint, from a copy in memory to its end."""
    drawing = Drawing(880, 306, "The life of a checkpoint")
    steps = (
        ("copied", "training goes on", BLUE),
        ("written", "temporary name,", BLUE),
        ("sealed", "a manifest of", BLUE),
        ("published", "renamed to step-N,", GREEN),
        ("verified", "digests again,", GREEN),
    )
    more = ("", "hashed, synced", "all digests", "latest names it", "before each load")
    for i, ((name, said, fill), also) in enumerate(zip(steps, more, strict=True)):
        x = 24 + 172 * i
        drawing.box(x, 50, 140, 74, fill)
        drawing.text(x + 70, 74, name, anchor="middle", size=15)
        drawing.text(x + 70, 94, said, anchor="middle", fill=INK, size=12)
        drawing.text(x + 70, 111, also, anchor="middle", fill=INK, size=12)
        if i:
            drawing.line(x - 32, 87, x - 2, 87, arrow=True)
    drawing.text(24, 30, "a death here leaves the checkpoint before, untouched", fill=DARK_BLUE)
    drawing.line(24, 38, 24 + 172 * 2 + 140, 38, fill=DARK_BLUE)
    drawing.text(24 + 172 * 3, 30, "from here on it is the newest", fill=DARK_BLUE)
    drawing.line(24 + 172 * 3, 38, 24 + 172 * 4 + 140, 38, fill=DARK_BLUE)
    ends = (
        (540, GREEN, "kept", "among the newest", "checkpoint.keep"),
        (368, AMBER, "best", "of checkpoint.best;", "best.json names it"),
        (196, LINE, "pruned", "neither of them", "any more"),
        (712, RED, "passed over", "digests differ: the", "one before is taken"),
    )
    for x, fill, name, said, also in ends:
        drawing.box(x, 196, 140, 74, fill)
        drawing.text(x + 70, 220, name, anchor="middle", size=14)
        drawing.text(x + 70, 240, said, anchor="middle", fill=INK, size=12)
        drawing.text(x + 70, 257, also, anchor="middle", fill=INK, size=12)
    drawing.line(610, 126, 610, 194, arrow=True)
    drawing.line(782, 126, 782, 194, arrow=True)
    drawing.line(570, 126, 570, 160)
    drawing.line(570, 160, 438, 160)
    drawing.line(438, 160, 438, 194, arrow=True)
    drawing.line(610, 270, 610, 288)
    drawing.line(610, 288, 266, 288)
    drawing.line(266, 288, 266, 272, arrow=True)
    drawing.line(438, 270, 438, 288)
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "timeline.svg": timeline,
    "holdings.svg": holdings,
    "checkpoint.svg": checkpoint,
}
