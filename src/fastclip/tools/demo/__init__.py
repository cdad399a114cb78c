"""A local web page to play with a trained model: `fastclip demo RUN`."""
