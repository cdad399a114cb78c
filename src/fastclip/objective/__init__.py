"""The training objective: the paper's losses, estimators and gradients."""
