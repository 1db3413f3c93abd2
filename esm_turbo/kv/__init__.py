"""Parts of the cache: its layers, its tensors by name, and tokens that are being appended."""
