"""Tests of lightning_ptm.planning; all pure, all fast."""
