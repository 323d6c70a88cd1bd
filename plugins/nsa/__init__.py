"""Native sparse attention: lightning indexer, exact top-k, attention over selected rows with a sink.

Every key row is its own value row (one KV head). For a query of token t with key set J(t):

    z_j = scale * (q . k_j),    p_j = exp(z_j) / (sum_J exp(z_i) + exp(sink_h)),    o = sum_J p_j k_j

    window:  J = rows of positions max(0, t-W+1) .. t
    HCA:     J = window + every compressed row w with w < floor((t+1) / ratio)
    CSA:     J = window + the top-k of those rows by  score_w = sum_h g_h relu(qI_h . kI_w)

Ties in the top-k go to the lowest row. Sources: DeepSeek-V3.2 report (lightning indexer), DeepSeek-V4 report (arXiv
2606.19348; window, CSA, HCA, sink). The op owns the window rings, the compressed rows and the indexer rows and writes
each once per step: rings are read as they were before the step, compressed and indexer rows as they are after it, so
the token that closes a window sees the row it completed.
Ops: `nsa_window`, `nsa_hca`, `nsa_csa`, `nsa_block` (a draft block over its context, bidirectional inside the block).
"""
