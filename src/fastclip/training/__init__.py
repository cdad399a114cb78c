"""The loop: from a recipe to a trained model, exact under interruption, at any number of workers."""
