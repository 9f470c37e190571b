"""Rates and FLOPs that no layer kind owns: what a token, a pair, a byte and a collective cost on a cluster."""
