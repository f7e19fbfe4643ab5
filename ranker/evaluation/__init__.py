"""Scoring of collections on all devices; measures, significance, reports and pictures of runs."""
