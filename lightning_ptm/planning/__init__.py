"""Planning: where model states are stored, what moves when, and whether the plan fits, decided before anything runs.

Pure: standard library only; no torch, no clock, no rank. In order of use: `layout.build_layout`, a trace
(`trace.sequential_trace` or the tracer's), `placement.place`, `schedule.schedule`, `simulate.simulate`,
`plan_table.render`.
"""
