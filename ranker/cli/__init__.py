"""The command line: `main` is the program and `entry` runs a command; the other modules support them."""
