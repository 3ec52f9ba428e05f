"""From records to fixed blocks of token ids, one file a rank, before a GPU is held for it."""
