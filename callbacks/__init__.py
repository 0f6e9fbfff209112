"""Callbacks for any Trainer; this folder is installed as `lightning_ptm.callbacks`."""

from __future__ import annotations

# Relative: in a checkout this folder is also the package `callbacks`.
from .grad_norm import GradNormMonitor
from .hyper_parameters import HyperParameters
from .memory_timeline import MemoryTimeline
from .page_monitor import PageMonitor, StalenessMonitor, TransferMonitor
from .page_tracer import PageTracer
from .perfetto_trace import PerfettoTrace
from .plan_printer import PlanPrinter
from .throughput import Throughput, ThroughputMonitor

__all__ = [
    "GradNormMonitor",
    "HyperParameters",
    "MemoryTimeline",
    "PageMonitor",
    "PageTracer",
    "PerfettoTrace",
    "PlanPrinter",
    "StalenessMonitor",
    "Throughput",
    "ThroughputMonitor",
    "TransferMonitor",
]
