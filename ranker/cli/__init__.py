"""The command line: `main` is the program, `entry` runs a command, and the other modules support these two."""
