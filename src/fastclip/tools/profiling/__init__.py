"""Where the time, memory and traffic of a training step go: measured (`profile`) and estimated (`plan`)."""
