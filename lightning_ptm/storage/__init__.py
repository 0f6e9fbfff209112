"""Checkpoints on disk: safetensors files, written in ranges, in folders that appear atomically."""
