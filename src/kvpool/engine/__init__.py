"""Serving many sequences: where models come from, scheduling, sampling, continuous batching."""
