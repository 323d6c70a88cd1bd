"""Mixture of experts: routing and the routed experts.

    V4:    s = sqrt(softplus(x W_g^T))                              scores, fp32
           ids = top-k of (s + bias)   or   tid2eid[token]  (hash layers)
    V3.2:  s = sigmoid(x W_g^T)
           ids = top-k of (s + bias) inside the best groups; a group counts its two largest (s + bias)
    both:  w = s[ids] / (sum s[ids] + 1e-20) * routed_scaling_factor      bias selects only, it never weighs
           y = sum_i w_i W2_i (silu(min(W1_i x, limit)) * clamp(W3_i x, -limit, limit))      V3.2: limit is infinite

Sources: DeepSeek-V4 report (arXiv 2606.19348), DeepSeek-V3 report (grouped routing without an auxiliary loss) and the
publisher's inference references; ties in the top-k go to the lowest expert or group index. Ops: `moe_route`,
`moe_route_hash`, `moe_route_grouped`, `moe_experts`, and for banks as releases store them (`quantised`)
`moe_experts_fp4` and `moe_experts_fp8`, which read no expert that nobody picked. The shared expert is a plain MLP of
the network.
"""
