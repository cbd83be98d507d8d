"""Definition, budgets, shapes and routes of ``conv1d``."""
