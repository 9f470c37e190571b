"""Heads exchanged (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509), for a block of its own for each sample.

Tokens of a sample lie on its child, c ranks with n / c tokens each. Attention needs whole sequences, and its heads are
independent. So one all-to-all turns (all heads, some tokens) into (some heads, all tokens) over the block of P ranks,
attention runs there, and a second one turns its output back. With H query and K KV heads a rank of the block computes
at most ceil(H / P) / H of the pairs, and gets ceil(H / P) + 2 x (the KV heads these use) vectors a token: beyond P = K
KV heads are copied, beyond P = H there is nothing more to share. docs/exchange.md has the layouts and the adjoint.
"""
