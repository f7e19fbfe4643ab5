"""Atomic writes of files and folders, full disks, and checksums."""
