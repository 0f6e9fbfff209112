"""Checkpoints: how they are written, read, resumed from and exported. (storage/ has the bytes of files and folders.)

| question | file |
| --- | --- |
| what can a format do, which are there, which one is used | `protocol.py`, `formats.py` |
| the formats | `full.py` (a file of Lightning), `sharded.py` (a folder), `pretrained.py` (Hugging Face's layout) |
| what do Lightning's calls on the strategy do | `run_checkpoints.py`; `file_io.py` (CheckpointIO plugins) |
| how is a full checkpoint made | `gathering.py` |
| how is a sharded one written, also while training goes on | `saving.py`, `row_exchange.py` |
| when is it written, after an interruption, too | `save_queue.py` |
| how are states loaded | `module_states.py`, `optimizer_states.py`; from weight files: `weights.py` |
| which checkpoint does a restarted run resume from | `auto_resume.py` |
| what goes back to the module at the end of a run, and is saved later | `restore.py`, `after_run.py` |
| how are states carried through a re-layout | `carried_states.py` |
| what do `lightning-ptm inspect` and `export` print and read | `opened.py` |
"""
