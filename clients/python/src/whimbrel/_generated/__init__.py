"""Layer that generate.py writes."""
