"""What tests share: models, fits, comparison with a plain Trainer, and which cases are quick."""
