"""Counting sort of slots by expert, and the plan made of it."""
