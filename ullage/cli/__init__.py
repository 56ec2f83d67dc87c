"""The command line: its parser, types of arguments, and what turns errors into exit codes."""
