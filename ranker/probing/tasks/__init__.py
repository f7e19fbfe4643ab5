"""Probing tasks. A task has a module here and a yaml with the same name in `conf/probe/`. See docs/add_a_probe.md."""
