"""The command line: a lazy group, one file per command, options declared once."""
