"""Full fine-tuning whose ranks always issue the same collectives: checked before it starts, visible while it runs."""
