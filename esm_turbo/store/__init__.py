"""Parts of a `ContextStore`: its files, its tiers in memory, and its counts of hits."""
