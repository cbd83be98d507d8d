"""One module per place where ``gqa`` runs; ``operands`` says what such a module is."""
