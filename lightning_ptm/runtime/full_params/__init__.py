"""Full parameters and optimizer states: gathered for the user, and moved between state dicts and pages."""
