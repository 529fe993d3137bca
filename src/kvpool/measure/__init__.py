"""Measuring on the user's machine and model: bandwidth, accuracy, replayed traces, and what a cache holds."""
