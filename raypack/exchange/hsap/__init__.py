"""HSAP: heads split inside a node, documents over the nodes, and only the keys that are needed cross (docs/hsap.md).

Every node of a parent attends for segments of the documents with the same number of causal pairs: of a document cut in
two at one place, n (1 - sqrt(1 - x)) tokens are x of the pairs. A node needs another's segment exactly when it holds a
later one of the same document, and gets it once, in ticks that run beside attention. Partial outputs o_i with
log-sum-exps l_i merge to o = sum_i exp(l_i - l) o_i, l = log sum_i exp(l_i).
"""
