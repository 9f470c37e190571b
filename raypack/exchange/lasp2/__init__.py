"""LASP-2: linear attention over ranks by one all-gather of states (Sun et al. 2025, arXiv 2502.07563; docs/linear.md).

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,   o_t = q_t S_t / sqrt(D)

A rank's part of a document comes down to the state L that it adds and the decay P of its tokens. All ranks gather these
at once, and the state that enters a shard is the sum over the ranks before it that hold the same document, In_i =
sum_{r < i} exp(log decays between) L_r. The backward is its mirror image. Bytes don't grow with tokens.
"""
