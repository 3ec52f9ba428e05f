"""The gate: six checks over all ranks before a job may start."""
