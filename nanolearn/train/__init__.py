"""The run: loop, checkpoints, records, watchman, launch."""
