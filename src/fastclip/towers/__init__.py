"""Towers that others trained, by name: timm's image models and Hugging Face's text encoders."""
