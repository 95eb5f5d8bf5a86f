"""Adapters to other libraries; each module registers itself when it is imported."""
