"""Where the ranks of a run wait for each other, and what they exchange beside pages."""
