"""Forecasts of `lightning-ptm plan`: seconds and bytes of a run that has not begun."""
