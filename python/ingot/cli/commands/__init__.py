"""The commands. `program` imports the file of a command when the command is called."""
