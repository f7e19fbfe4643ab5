"""Pretraining objectives, one per file. Each has a yaml file of the same name in conf/objective."""
