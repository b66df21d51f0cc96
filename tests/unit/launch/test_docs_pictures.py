"""The pictures of the docs, read back from the SVG: what the arithmetic, or a terminal's screen, says."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launch.docs.pictures import PICTURES, held
from launch.docs.terminal import RUN, picture

SVG = "{http://www.w3.org/2000/svg}"


def _texts(name: str) -> list[str]:
    root = ElementTree.fromstring(PICTURES[name]())  # noqa: S314  made by this program
    return [str(one.text) for one in root.iter(f"{SVG}text")]


def test_the_timeline_has_each_sample_once_and_micro_batches_of_three_at_most() -> None:
    boxes = [[int(n) for n in text.split(", ")] for text in _texts("timeline.svg") if re.fullmatch(r"[\d, ]+", text)]
    assert sorted(n for box in boxes for n in box) == list(range(29))
    assert max(map(len, boxes)) == 3
    assert [len(box) for box in boxes if box[0] < 26] == [3, 3, 3, 3, 1, 3, 3, 3, 3, 1]  # 26 = 6 + 7 + 6 + 7
    assert _texts("timeline.svg").count("reduction") == 2
    assert _texts("timeline.svg").count("nothing: zeros") == 1  # 3 samples on 4 ranks


def test_ranks_hold_what_the_zero_paper_says() -> None:
    """Figure 1's arithmetic in fp32 with Adam: 4 + 4 + 8 bytes, of which a stage divides the last, two or all by 8."""
    totals = {name: sum(parts.values()) for name, parts in held().items()}
    assert totals["ddp"] == 4 + 4 + 8
    assert totals["zero1"] == 4 + 4 + 8 / 8
    assert totals["fsdp2"] == 4 / 8 + 4 + 8 / 8  # whole gradients until the boundary
    assert totals["fsdp2, sync=every"] == (4 + 4 + 8) / 8
    assert totals["deepspeed, stage 1"] == 4 + 4 / 8 + 4 + 8 / 8  # fp32 weights that it steps, next to the model's
    shown = [float(text) for text in _texts("holdings.svg") if re.fullmatch(r"[\d.]+", text)]
    assert [total for total in shown if total in totals.values()] == pytest.approx(list(totals.values()))


def test_the_life_of_a_checkpoint_has_its_stations() -> None:
    assert {"copied", "written", "sealed", "published", "verified", "kept", "best", "pruned", "passed over"} <= set(
        _texts("checkpoint.svg")
    )


IMAGE = Path(__file__).parents[3] / "docs" / "images" / "terminal-80.svg"


def _lines(svg: str) -> str:
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")  # noqa: S314  our own
    return "\n".join("".join(text.itertext()).replace("\xa0", " ") for text in texts)


def test_a_screen_becomes_a_picture() -> None:
    svg = picture("step 5/10  loss 0.5\n\x1b[33mskipped & <gone>\x1b[0m", 80)
    assert "step 5/10  loss 0.5\n" in _lines(svg)
    assert "skipped & <gone>" in _lines(svg)
    assert not re.search(r"url\([^#]|href|src=", svg)


def test_the_picture_in_the_docs_has_what_its_page_says() -> None:
    text = _lines(IMAGE.read_text())
    for part in ("held-out:", "saved: runs/first/checkpoints/step-15", "ETA", "tokens/s", "4x Block"):
        assert part in text
    assert "hydra.run.dir=runs/first" in RUN
