"""An hour's programme for a machine with one or two GPUs: `make gpu`."""
