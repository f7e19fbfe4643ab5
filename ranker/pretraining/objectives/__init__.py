"""What a pretraining learns: one objective per file, with a yaml of the same stem in conf/objective."""
