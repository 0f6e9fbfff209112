"""Commands of `lightning-ptm` that are not Lightning's: each a function whose arguments are its command line."""
