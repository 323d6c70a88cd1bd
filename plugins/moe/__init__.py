"""Mixture of experts: routing and the routed experts.

    s = sqrt(softplus(x W_g^T))                                     scores, fp32
    ids = top-k of (s + bias)   or   tid2eid[token]  (hash layers)  bias selects only, it never weighs
    w = s[ids] / (sum s[ids] + 1e-20) * routed_scaling_factor
    y = sum_i w_i W2_i (silu(min(W1_i x, limit)) * clamp(W3_i x, -limit, limit))

Source: DeepSeek-V4 report (arXiv 2606.19348) and the publisher's inference reference; ties in the top-k go to the
lowest expert index. Ops: `moe_route`, `moe_route_hash`, `moe_experts`. The shared expert is a plain MLP of the
network.
"""
