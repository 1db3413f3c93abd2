"""The command line: commands, the options they share, and reports."""
