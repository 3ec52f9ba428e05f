"""The gate: six things that must hold over all ranks before a job may start, judged by one pure function."""
