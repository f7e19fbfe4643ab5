"""Token batches to hidden states: loading, ragged and padded execution, kernels."""
