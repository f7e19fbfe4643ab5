"""Build the objects of a command from its configuration: run folder, data, scorer, trainer."""
