"""From records to fixed blocks of token ids, one file per rank."""
