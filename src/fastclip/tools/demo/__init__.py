"""A local web page to try out a trained model: `fastclip demo RUN`."""
