"""The timeline of a plan: who computes, sends and waits when, and what lies in memory meanwhile.

graph ─▶ steps ─▶ sections ─▶ chunk, actions (pcg.step) ─▶ pricing, pool: segments ─▶ program ─▶ timeline ─▶ trace
                                        ending: update ─────────┘ │ clock: streams     schedules ──┘
"""
