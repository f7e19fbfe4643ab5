"""Early exit: heads at several layers of one cross-encoder, which may score a pair before its last layer."""
