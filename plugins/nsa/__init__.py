"""Native sparse attention: lightning indexer, exact top-k, attention over selected rows.

V4: every key row is its own value row (one KV head). For a query of token t with key set J(t):

    z_j = scale * (q . k_j),    p_j = exp(z_j) / (sum_J exp(z_i) + exp(sink_h)),    o = sum_J p_j k_j

    window:  J = rows of positions max(0, t-W+1) .. t
    HCA:     J = window + every compressed row w with w < floor((t+1) / ratio)
    CSA:     J = window + the top-k of those rows by  score_w = sum_h g_h relu(qI_h . kI_w)

V3.2 (MLA, absorbed form): a token's row is [latent c_j | rotary key], its value c_j; no window and no sink:

    z_j = scale * (q . row_j),  p = softmax_J(z),  o = sum_J p_j c_j,  J = the top-k of rows 0 .. t by score_j

With index keys in fp8 (`index_keys.py`) queries and keys are quantised first and keys are read as they were stored.
Ties in the top-k go to the lowest row. Sources: DeepSeek-V3.2 report (lightning indexer, MLA over its selection),
DeepSeek-V4 report (arXiv 2606.19348; window, CSA, HCA, sink). The op owns the window rings, the compressed or latent
rows and the indexer rows and writes each once per step: rings are read as they were before the step, the others as
they are after it, so the token that closes a window sees the row it completed, and an MLA token its own.
Ops: `nsa_window`, `nsa_hca`, `nsa_csa`, `nsa_block` (a draft block over its context, bidirectional inside the block),
`nsa_mla`, and `nsa_mla_fp8_index`, which keeps its index keys in fp8 pages.
"""
