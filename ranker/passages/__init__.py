"""Read docs as windows: a scorer whose rows are windows of docs, and aggregations of windows to docs."""
