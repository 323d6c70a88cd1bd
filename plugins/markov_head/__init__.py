"""DSpark's sequential head: G picks, each biased by the tokens before it, and a confidence per pick.

    x_0 = anchor,  e_k = W1[x_{k-1}],  logits_k = U_k + B_k,  x_k = argmax(logits_k * inverse_temperature + noise_k)

    vanilla   B_k = W2 e_k
    gated     B_k = W2 (sigmoid(gate_proj [h_k ; e_k]) * e_k)
    rnn       (g, c, o) = joint_proj [s_{k-1} ; e_k ; h_k],  s_k = sigmoid(g) * s_{k-1} + (1 - sigmoid(g)) * tanh(c),
              B_k = W2 tanh(o),  s_0 = 0

    confidence_k = sigmoid(proj . [h_k ; e_k] + bias)

gate_proj and joint_proj have a bias. B_k is added at every position, the first included. h_k is the draft's hidden row:
V4 takes it before its final norm and has no confidence bias, dense drafts take it after the norm and have one; e_k is
left out of the confidence where the checkpoint says so.

Greedy requests pass inverse temperature 1 and no noise; sampled ones pass Gumbel noise, which makes the argmax a sample
of softmax(logits_k * inverse_temperature): no generator inside the graph. Ties in a pick go to the lowest id. Source:
DSpark (arXiv 2607.05147). Ops: `markov_picks`, `markov_picks_gated`, `markov_picks_rnn`. The confidence is no op: its
rows are all known once the picks are, and every compiler has what it computes.
"""
