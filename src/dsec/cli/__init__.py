"""The command line. Its modules are loaded when their command is named."""
