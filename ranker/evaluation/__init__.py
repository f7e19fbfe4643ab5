"""Score collections on all devices; compute measures, significance, reports and pictures of runs."""
