"""What is decided before a byte is allocated: layout, tiers, inventory, plans, and the virtual run that predicts memory."""
