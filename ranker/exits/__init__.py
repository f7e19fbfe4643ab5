"""Early exit: a cross-encoder with heads at several layers, so that a pair can be scored before the last layer."""
