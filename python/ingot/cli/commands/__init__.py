"""The commands, each in the file of its name, which `program` imports when it is called."""
