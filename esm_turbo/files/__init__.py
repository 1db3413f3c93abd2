"""Files: artifacts, fingerprints, folders with one writer, tables, and model lookup."""
