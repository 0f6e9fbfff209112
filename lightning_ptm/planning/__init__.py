"""Planning: where model states live, what moves when, and whether that works, decided before anything runs.

Pure: standard library only; no torch, no clock, no rank. In order of use: `layout.build_layout`, a trace
(`trace.sequential_trace` or the tracer's), `placement.place`, `schedule.schedule`, `simulate.simulate`, `render.render`.
"""
