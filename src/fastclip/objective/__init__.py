"""What is minimised: the paper's losses, estimators and gradients. Knows torch and nothing else of ours."""
