"""Random trainings by the strategy against a plain Trainer, bit for bit.

`programs.py` draws a program from a seed, `module.py` is the LightningModule that does what it says, `judge.py` runs it
twice. `pytest tests/fuzz --seeds 500` tries 500 seeds; a failure shows the seed and its program.
"""
