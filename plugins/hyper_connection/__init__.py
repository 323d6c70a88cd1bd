"""Manifold-constrained hyper-connections (mHC): `m` residual streams mixed by a doubly stochastic matrix per token.

With x = flatten(X), X [N, m, D], and mixes = (fn x) * rsqrt(mean(x^2) + norm_eps), split in (pre m, post m, comb m*m):

    pre  = sigmoid(pre * scale[0] + base) + eps          a   = sum_j pre_j X_j          (input of the sublayer)
    post = 2 sigmoid(post * scale[1] + base)             X'_k = post_k y + sum_j C[j, k] X_j
    C    = Sinkhorn(softmax_k(comb * scale[2] + base) + eps): one column normalisation, then `iterations - 1` times
           rows then columns, every division by (sum + eps)

The sum in X' runs over the FIRST index of C. Source: DeepSeek-V4 report (arXiv 2606.19348), hyper-connection section,
and the publisher's inference reference. All arithmetic is fp32.
Ops: `hc_pre`, `hc_post`, `hc_head` (the collapse after the last layer: pre only).
"""
