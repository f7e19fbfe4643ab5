"""The command line: `main` is the program, `entry` runs a command, `resume`, `overrides`, `usage`, `sweep` support it."""
