"""Decisions made before allocation: layout, tiers, inventory, and plans."""
