"""What the documentation is made of that a program makes: tables of settings, pictures, the site's pages of files.

Begin with ``__main__.py``, which writes tables and pictures; the site is mkdocs' (``.mkdocs.yml``), with ``hooks.py``.
"""
