"""Engines of elastic runs: what they hold beside the core's of the open window, and of other ranks' state."""
