"""Files: artifacts, fingerprints, atomic writes, tables, and model lookup."""
