"""The command line: one module per command, imported when the command is used (see `kvstore.cli.app`)."""
