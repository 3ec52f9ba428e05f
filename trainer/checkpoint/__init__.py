"""Checkpoints as Hugging Face directories, written by all ranks together, complete or not there."""
