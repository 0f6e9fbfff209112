"""Full parameters and optimizer states in the user's hands, and in and out of pages."""
