"""The commands of `ranker`, one per module."""
