"""Scores an attempt's artifact in a fresh sandbox with the task's private tests. Nothing in harness/ may import this."""
