"""What a `ContextStore` is made of: its files, its tiers in memory, and its counts of hits."""
