"""Definition, budgets, shapes and routes of ``rmsnorm``."""
