"""Where pairs come from: sources, manifest, order, decoding and the loader."""
