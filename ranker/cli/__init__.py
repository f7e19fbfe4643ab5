"""The command line: entry, help, sweeps."""
