"""Definition, budgets, shapes and routes of ``gdn``."""
