"""Grid modes (experimental): tensor parallelism over a square (2D, SUMMA) or a cube (3D) of ranks, as in Colossal-AI."""

from lightning_ptm.parallel.grid.layers import (
    Grid,
    GridEmbedding,
    GridLayer,
    GridLinear,
    GridNorm,
    blocks,
    load_whole,
    whole,
)

__all__ = ["Grid", "GridEmbedding", "GridLayer", "GridLinear", "GridNorm", "blocks", "load_whole", "whole"]
