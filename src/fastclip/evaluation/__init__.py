"""Scoring models: tasks, features, metrics, suites."""
