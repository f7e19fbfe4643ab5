"""Token batches to hidden states. Read `encoder`, `ragged_forward` and `layer`; `paths` lists the faster ways."""
