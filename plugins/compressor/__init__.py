"""KV compressor of DeepSeek-V4: one row per `ratio` tokens, a softmax-weighted sum per channel.

    K = wkv x, Z = wgate x + ape[t mod ratio]                     per token, both [c*D]
    HCA (c = 1):            E_w = sum_j softmax_j(Z_j) * K_j      over the `ratio` tokens of window w
    CSA (c = 2, overlap):   the same over 2*ratio slots: first halves of window w-1, then second halves of window w

The op owns the raw rows [K | Z], kept in a ring because a window may close several steps after its first token was
seen, and returns the rows of the windows that this step's tokens complete, (t+1) mod ratio = 0. Norm and rope of a row
belong to the network, writing it to `nsa`. Source: DeepSeek-V4 report (arXiv 2606.19348).
Op: `compress`.
"""
