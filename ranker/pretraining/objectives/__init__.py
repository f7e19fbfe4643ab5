"""Pretraining objectives: one per file, with a yaml file of the same name in conf/objective."""
