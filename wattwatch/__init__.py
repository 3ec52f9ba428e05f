"""Out-of-band watcher for multi-node GPU training."""
