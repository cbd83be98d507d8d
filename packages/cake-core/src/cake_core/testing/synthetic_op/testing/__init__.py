"""Definition, budgets, shapes and routes of the synthetic op."""
