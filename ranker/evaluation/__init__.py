"""Measures, significance, reports and pictures of runs."""
