"""Compressed late-interaction index: centroids and quantized residuals of token vectors, and their search."""
