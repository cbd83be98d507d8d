"""Definition, budgets, shapes and routes of ``gated_rmsnorm``."""
