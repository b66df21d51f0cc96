"""The picture of the terminal: what is on the screen is in it, and it asks for nothing from the network."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from launch.docs.terminal import RUN, picture

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
    for part in ("held-out:", "saved: /project/runs/first/checkpoints/step-15", "ETA", "tokens/s", "4x Block"):
        assert part in text
    assert "hydra.run.dir=runs/first" in RUN
