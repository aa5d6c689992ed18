"""Options of commands: groups of them, sizes with units, and those of sampling."""
