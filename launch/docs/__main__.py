"""``python -m launch.docs`` writes what a program makes of the documentation: the tables of settings, the pictures."""

from __future__ import annotations

from launch.docs.pictures import IMAGES, PICTURES
from launch.docs.settings import PAGE, with_tables

if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
