"""THE JOB: from records to token blocks, and the gate in front of a launch. Knows nothing of collectors and watcher."""
