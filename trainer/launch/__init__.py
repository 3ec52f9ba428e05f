"""One command for a job on many nodes: gate, ranks, and again from the last complete checkpoint."""
