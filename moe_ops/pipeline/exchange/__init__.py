"""Ranks that exchange tokens: rows travel to the ranks of their experts, partial sums come back."""
