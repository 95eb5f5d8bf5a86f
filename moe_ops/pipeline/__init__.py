"""The stages put together."""
