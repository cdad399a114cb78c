"""Where the time, the memory and the bytes of a training step go: measured, and foretold."""
