"""Turn token batches into hidden states. Read `encoder`, `ragged_forward` and `layer` first; then `paths`."""
