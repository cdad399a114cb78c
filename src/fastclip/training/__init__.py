"""The training loop: from a recipe to a trained model, exact under interruption, with any number of ranks."""
