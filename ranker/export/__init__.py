"""Folders of other programs, read and written."""
