"""Commands of `lightning-ptm` other than the Trainer's: functions whose parameters are the command line."""
