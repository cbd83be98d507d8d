"""What tests, ``cake verify`` and ``cake bench`` use; the op itself never imports it."""
