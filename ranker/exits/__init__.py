"""Early exit: a cross-encoder with heads at several layers, which can score a pair before the last layer."""
