"""DSpark's sequential head: G picks, each biased by the token before it, and a confidence per pick.

    x_0 = anchor,  e_k = W1[x_{k-1}],  logits_k = U_k + W2 e_k,  x_k = argmax(logits_k * inverse_temperature + noise_k)
    confidence_k = sigmoid(proj . [h_k ; e_k])             h_k before the final norm, no bias

The bias is applied at every position, the first included. Greedy requests pass inverse temperature 1 and no noise;
sampled ones pass Gumbel noise, which makes the argmax a sample of softmax(logits_k * inverse_temperature): no generator
inside the graph. Source: DSpark (arXiv 2607.05147), vanilla head. Ties in a pick go to the lowest id. Op:
`markov_picks`.
"""
