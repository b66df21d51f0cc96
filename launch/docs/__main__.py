"""``python -m launch.docs`` writes what a program makes: the tables of settings, their JSON schema, the pictures."""

from __future__ import annotations

from launch.docs import json_schema
from launch.docs.pictures import IMAGES, PICTURES
from launch.docs.settings import PAGE, with_tables

if __name__ == "__main__":
    json_schema.FILE.write_text(json_schema.schema())
    PAGE.write_text(with_tables(PAGE.read_text()))
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
