"""Test support that op packages share; shipped in the wheel, imports no pytest."""
