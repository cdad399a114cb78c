"""HTML reports about runs and studies: training curves, scores, search examples and hard pairs."""
