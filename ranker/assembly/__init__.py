"""From configuration to objects: run folder, data, scorer, trainer."""
