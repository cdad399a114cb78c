"""Training pairs: sources, manifest, order, decoding and the loader."""
