"""Probing tasks: one module each, and one yaml of the same stem in `conf/probe/`. See docs/add_a_probe.md."""
