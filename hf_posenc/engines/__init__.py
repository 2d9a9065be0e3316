"""What other people's runtimes make of a checkpoint: measured or read in their source, as data."""
