"""neo_compile."""
