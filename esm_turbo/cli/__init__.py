"""The command line: commands, their shared options, and how results are printed."""
