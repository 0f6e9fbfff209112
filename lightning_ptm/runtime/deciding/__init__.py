"""Decisions made before allocation: layout, tiers, inventory, plans, and the virtual run that predicts memory."""
