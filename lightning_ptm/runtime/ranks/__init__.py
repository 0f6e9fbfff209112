"""Coordination between ranks during a run: barriers, exchanges of activations and tokens, module buffers."""
