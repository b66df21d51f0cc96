"""Checkpoints that are either whole and verified, or not there: ``store`` keeps folders, ``state`` what is in them."""
