"""Plain Hugging Face directories, written by all ranks, that are there whole or not at all."""
