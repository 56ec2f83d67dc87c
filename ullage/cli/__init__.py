"""The command line: options, types of arguments, signals and exit codes."""
